"""Rotary position embedding (Su et al. 2021, "RoFormer") of queries and keys, in Hugging Face's half-split layout.

  run(q [T, N, H], k [T, K, H], positions int32 [T], inverse_frequencies float32 [H/2]) -> (q, k)

Channels i and i + H/2 of a head are a pair, rotated by `positions * inverse_frequencies[i]` radians.
"""
