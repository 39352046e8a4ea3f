"""The kernels' shared cases on every instruction set that this machine has, and under the sanitizers.

Each build is loaded by a process of its own, `native_variant.py`.
"""

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import jax
import pytest

from jetserve.kernels import native
from jetserve.kernels.native import builder

HERE = Path(__file__).parent
SECONDS = 1500
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-O1", "-g")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(native.library() is None, reason="there is no C++ compiler"),
]


def run_variant(folder: Path, *flags: str, environment: Mapping[str, str] | None = None) -> str:
    """What the tests printed, of a library built with these flags."""
    done = subprocess.run(
        [sys.executable, str(HERE / "native_variant.py"), str(folder), *flags],
        env={**os.environ, "PYTHONPATH": str(HERE.parents[1]), "JAX_PLATFORMS": "cpu", **(environment or {})},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    assert "passed" in done.stdout
    return done.stdout


def test_portable(tmp_path: Path) -> None:
    assert "instructions: portable" in run_variant(tmp_path, "-DJETSERVE_PORTABLE")


@pytest.mark.skipif(
    native.library() is None or "AVX-512" not in native.instructions(), reason="AVX2 is its best, or it has none"
)
def test_avx2_where_there_is_better(tmp_path: Path) -> None:
    assert "instructions: AVX2" in run_variant(tmp_path, "-mno-avx512f")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the compiler knows other processors")
@pytest.mark.parametrize("processor", ["haswell", "skylake-avx512", "icelake-server"])
def test_the_sources_compile_for_other_processors(processor: str) -> None:
    for source in (path for path in builder.sources() if path.suffix == ".cc"):
        command = builder.compile_command(builder.compiler(), source, f"-march={processor}", "-fsyntax-only")
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def runtimes() -> str:
    """The sanitizers' libraries, which must be loaded before all others."""
    paths = []
    for name in ("libasan.so", "libubsan.so"):
        command = [*builder.compiler().command, f"-print-file-name={name}"]
        path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        if not Path(path).is_absolute():
            pytest.skip(f"the compiler comes without {name}")
        paths.append(path)
    return " ".join(paths)


def test_sanitizers_find_nothing(tmp_path: Path, runtimes: str) -> None:
    """No byte outside of a buffer is touched, and no behaviour is undefined, in any of the cases.

    A library with the address sanitizer refuses to load without its runtime, so it cannot be left out unnoticed.
    """
    environment = {
        "LD_PRELOAD": runtimes,
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    }
    run_variant(tmp_path, *SANITIZERS, environment=environment)


@pytest.mark.usefixtures("runtimes")
@pytest.mark.parametrize(("kernel", "cases"), [("attention", 27), ("quantized_matmul", 864)])
def test_sanitizers_find_nothing_at_the_edges(kernel: str, cases: int, tmp_path: Path) -> None:
    """Buffers as XLA never makes them, empty batches, and numbers that point elsewhere."""
    program = tmp_path / kernel
    command = [*builder.compiler().command, "-std=c++17", builder.march_flag(), *SANITIZERS]
    command += ["-isystem", jax.ffi.include_dir()]
    command += ["-I", str(Path(native.__file__).parent), str(HERE / f"{kernel}_memory.cc"), "-pthread", "-o", program]
    for step in (command, [program]):
        done = subprocess.run(step, capture_output=True, text=True, timeout=SECONDS, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
    assert f"{cases} cases" in done.stdout
