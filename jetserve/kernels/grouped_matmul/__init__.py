"""Rows of several experts, each times its own matrix.

  run(x [R, K], w [E, K, N], group_sizes int32 [E], *, out_dtype=None) -> [R, N]

The first group_sizes[0] rows are multiplied with w[0], those after them with w[1], and so on; the sizes add up to R.
w is plain or quantized (a QArray whose leaves have E ahead). Accumulates in float32, returns x's dtype unless told.
"""
