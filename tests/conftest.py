"""What the tests share: where the real data and the real model are, or the reason why a test that needs them skips."""

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest
from many_devices import environment_of_devices

from jetserve import default_model
from jetserve.kernels import native

CACHE = default_model.default_cache_dir()
SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"

jax.config.update("jax_compilation_cache_dir", str(CACHE / "xla"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)

native.library()  # once a process, from the user's cache: tests name other folders for it

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs would ignore it


@pytest.fixture(scope="session")
def default_gguf() -> Path:
    """The default model's GGUF file."""
    try:
        return default_model.fetch(CACHE)
    except RuntimeError as error:
        pytest.skip(str(error))


def _run_apart(tests: Path, environment: Mapping[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)],
        env=environment,
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]


@pytest.fixture(scope="session")
def run_on_eight_devices() -> Callable[[Path], None]:
    """Runs a file of tests in a process with eight CPU devices."""
    return lambda tests: _run_apart(tests, environment_of_devices(8))


@pytest.fixture(scope="session")
def run_with_libtpu() -> Callable[[Path], None]:
    """Runs a file of tests in a process of its own: where libtpu is loaded, jax's profiler crashes."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed")
    # It only compiles: it looks for no TPU, and keeps no other process from compiling.
    alone = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    return lambda tests: _run_apart(tests, {**os.environ, **alone})


def _data(name: str) -> Path:
    path = SHARED_DATA / name
    if not path.exists():
        pytest.skip(f"../shared/data/{name} is not there")
    return path


@pytest.fixture(scope="session")
def calibration_text() -> Path:
    """WikiText-2, validation split."""
    return _data("wikitext2-valid.txt")


@pytest.fixture(scope="session")
def evaluation_text() -> Path:
    """WikiText-2, test split."""
    return _data("wikitext2-test.txt")
