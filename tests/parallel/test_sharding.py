"""Sharding, on eight CPU devices that stand for chips. They must be asked for before jax starts: another process runs
`eight_devices.py`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_on_eight_devices() -> None:
    here = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(here / "eight_devices.py")]
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        command,
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        cwd=here.parents[1],
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
