"""Several linear maps of one input: `x [..., K]`, `weights [K, N]`, `biases [N]` or None -> a list of `[..., N]`.

What a layer calls, so that an implementation may read the input once for all of them.
"""
