"""Sharding, on eight CPU devices that stand for chips."""

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.mark.slow
def test_on_eight_devices(run_on_eight_devices: Callable[[Path], None]) -> None:
    run_on_eight_devices(Path(__file__).with_name("eight_devices.py"))
