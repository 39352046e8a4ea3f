"""The C++ kernels for CPUs: compiled at first use by the system's compiler, kept in the user's cache, called by XLA.

Owns building and loading. What the kernels compute, and their layouts, is said in the sources beside this file; how JAX
arrays reach them, in `<operation>/cpu.py`. Without a compiler there is one warning, and other implementations run.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import jax
import jaxlib

from jetserve.default_model import default_cache_dir

logger = logging.getLogger(__name__)

COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-ffp-contract=fast", "-fno-math-errno")
TARGETS = (
    "jetserve_quantized_matmul",
    "jetserve_embedding_lookup",
    "jetserve_rms_norm",
    "jetserve_rope",
    "jetserve_attention_f32",
    "jetserve_attention_bf16",
    "jetserve_attention_s8",
)
BUILD_SECONDS = 300


class BuildError(RuntimeError):
    """The kernels cannot be compiled: says why, and what to install."""


def sources() -> list[Path]:
    """The files that are compiled, headers among them."""
    folder = Path(__file__).parent
    return sorted([*folder.glob("*.cc"), *folder.glob("*.h")])


def processor() -> str:
    """What the processor can do, as the system describes it: programs built for one may not run on another."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    features = {line.split(":", 1)[1].strip() for line in lines if line.startswith(("flags", "Features"))}
    return f"{platform.machine()} {' '.join(sorted(features)) or platform.processor()}"


def compiler() -> str:
    """The path of the compiler. Raises BuildError if there is none."""
    found = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if found is None:
        raise BuildError(f"no C++ compiler was found; expected one of {', '.join(COMPILERS)}. Install g++ or clang")
    return found


def compiler_version() -> str:
    """What the compiler says about itself. Raises BuildError if there is none."""
    return subprocess.run([compiler(), "--version"], capture_output=True, text=True, check=False).stdout


def library_path(folder: Path, *, extra_flags: tuple[str, ...] = ()) -> Path:
    """Where `build` puts the library: its name is a digest of all that goes into it. Raises BuildError as `build`."""
    digest = hashlib.sha256()
    for part in (compiler_version(), processor(), jaxlib.__version__, *FLAGS, *extra_flags):
        digest.update(part.encode() + b"\0")
    for source in sources():
        digest.update(source.read_bytes())
    return folder / f"kernels-{digest.hexdigest()[:24]}.so"


def march_flag() -> str:
    """The compiler's flag for all that this processor can do."""
    return "-mcpu=native" if platform.machine() == "aarch64" else "-march=native"


def compile_command(*extra_flags: str) -> list[str]:
    """Compiles the sources for this processor unless flags say otherwise. Raises BuildError without a compiler."""
    files = [str(source) for source in sources() if source.suffix == ".cc"]
    return [compiler(), *FLAGS, march_flag(), *extra_flags, "-isystem", jax.ffi.include_dir(), *files]


def build(folder: Path, *, extra_flags: tuple[str, ...] = ()) -> Path:
    """The path of the compiled library in `folder`, made unless it is there.

    Safe when several processes build at once: each writes a file of its own, which takes the name when it is whole.

    Raises:
      BuildError: if there is no compiler, or it fails.
    """
    path = library_path(folder, extra_flags=extra_flags)
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    logger.info("compiling the kernels for this processor, once, into %s", folder)
    with tempfile.TemporaryDirectory(dir=folder) as room:
        made = Path(room) / path.name
        command = [*compile_command(*extra_flags), "-o", str(made)]
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=BUILD_SECONDS)
        if result.returncode:
            raise BuildError(f"{' '.join(command)} failed:\n{result.stderr.strip()[-2000:]}")
        os.replace(made, path)
    return path


def load(path: Path) -> ctypes.CDLL:
    """A library that `build` made, its kernels registered with XLA. Raises OSError if it cannot be loaded."""
    loaded = ctypes.CDLL(str(path))
    loaded.jetserve_instructions.restype = ctypes.c_char_p
    for name in TARGETS:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(loaded, name)), platform="cpu")
    return loaded


def library_folder() -> Path:
    """Where the library is kept."""
    return default_cache_dir() / "kernels"


@functools.cache
def library() -> ctypes.CDLL | None:
    """The kernels, registered with XLA; None, after one warning, where they cannot be built."""
    try:
        return load(build(library_folder()))
    except (BuildError, OSError, subprocess.TimeoutExpired) as error:
        logger.warning("the kernels for CPUs are not there, so XLA's own code runs, many times slower: %s", error)
        return None


def _required() -> ctypes.CDLL:
    loaded = library()
    if loaded is None:
        raise NotImplementedError("the kernels for CPUs are not there")
    return loaded


def lanes() -> int:
    """Columns of a weight in one tile, which depends on what the kernels were compiled for.

    Raises:
      NotImplementedError: if there are no kernels.
    """
    return _required().jetserve_lanes()


def instructions() -> str:
    """The instruction set that the kernels were written for, of those that this processor has.

    Raises:
      NotImplementedError: if there are no kernels.
    """
    name: bytes = _required().jetserve_instructions()
    return name.decode()


def require_one_device() -> None:
    """For operations whose arguments would have to be gathered from several devices.

    Raises:
      NotImplementedError: if there are no kernels, or more than one device.
    """
    _required()
    if jax.device_count() > 1:
        raise NotImplementedError("the arrays may be spread over several devices")
