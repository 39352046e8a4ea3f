"""`x / rms(x) * scale` over the last axis (Zhang and Sennrich 2019): `x [..., D]`, `scale [D]` -> `[..., D]`."""
