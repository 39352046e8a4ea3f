"""`x [..., K] @ w [K, N]`, where w is a plain or a quantized matrix. Accumulates in float32, returns x's dtype."""
