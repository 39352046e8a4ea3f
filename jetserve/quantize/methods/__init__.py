"""Quantization methods: one file each, found by its name."""
