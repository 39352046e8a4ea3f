"""The kernels' tests with another build of the library: python native_variant.py FOLDER [FLAG...]

Run as a process of its own by `test_native_variants.py`: a process registers kernels with XLA once.
"""

import functools
import sys
from pathlib import Path

import pytest

from jetserve.kernels import native
from jetserve.kernels.native import builder

TESTS = ("test_attention.py", "test_quantized_matmul.py", "test_embedding_lookup.py", "test_elementwise.py")


def main() -> None:
    """Exits with pytest's status."""
    folder, *flags = sys.argv[1:]
    path = builder.build(Path(folder), extra_flags=tuple(flags))
    native.library = functools.cache(lambda: native.load(path))
    print(f"instructions: {native.instructions()}")
    here = Path(__file__).parent
    raise SystemExit(pytest.main(["-q", "-k", "cpu", "-p", "no:cacheprovider", *(str(here / name) for name in TESTS)]))


if __name__ == "__main__":
    main()
