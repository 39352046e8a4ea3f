"""What the real TPU compiler makes of the kernels and of the steps, in processes of their own."""

from collections.abc import Callable
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.parametrize("tests", ["kernels/pallas_tpu_compiled.py", "plan/plan_program.py"])
def test_compiled_for_tpus(tests: str, run_with_libtpu: Callable[[Path], None]) -> None:
    run_with_libtpu(TESTS / tests)
