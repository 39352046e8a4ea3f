"""jetserve: a JAX/XLA serving stack for large language models with 4-bit and 8-bit weights."""

__version__ = "0.1.0"
