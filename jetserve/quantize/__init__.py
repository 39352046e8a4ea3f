"""Quantized arrays and the ways to make them."""

from jetserve.quantize.qarray import QArray, QuantizationConfig, dequantize, quantize

__all__ = ["QArray", "QuantizationConfig", "dequantize", "quantize"]
