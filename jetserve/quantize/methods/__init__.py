"""Quantization methods: one file each, found by its name."""

import pkgutil


def names() -> list[str]:
    """Every method that there is."""
    return sorted(info.name for info in pkgutil.iter_modules(__path__))
