"""The C++ kernels for CPUs: compiled at first use by the system's compiler, kept in the user's cache, called by XLA.

Owns loading; `builder` builds. What the kernels compute, and their layouts, is said in the sources beside this file;
how JAX arrays reach them, in `<operation>/cpu.py`. Without kernels there is one warning, and other code runs.
"""

import ctypes
import dataclasses
import functools
import logging
from pathlib import Path

import jax

from jetserve.default_model import NoHomeError, default_cache_dir
from jetserve.kernels.native import builder

logger = logging.getLogger(__name__)

TARGETS = (
    "jetserve_quantized_matmul",
    "jetserve_embedding_lookup",
    "jetserve_rms_norm",
    "jetserve_rope",
    "jetserve_argmax",
    "jetserve_attention_f32",
    "jetserve_attention_bf16",
    "jetserve_attention_s8",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loaded:
    """The library and where it is, or neither and why."""

    library: ctypes.CDLL | None = None
    path: Path | None = None
    error: str = ""


def load(path: Path) -> ctypes.CDLL:
    """A library that `builder` made, its kernels registered with XLA. Raises OSError if it cannot be loaded."""
    library = ctypes.CDLL(str(path))
    for function in (library.jetserve_instructions, library.jetserve_compiler):
        function.restype = ctypes.c_char_p
    for name in TARGETS:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    return library


_cache_dir: Path | None = None
"""In place of the default one."""


def use_cache_dir(cache_dir: Path) -> None:
    """Keeps the library in this folder. Takes effect before the library is loaded, which happens once."""
    global _cache_dir
    _cache_dir = cache_dir


def library_folder() -> Path:
    """Where libraries are kept. Raises NoHomeError if it was not told, and the user has no home."""
    return (_cache_dir or default_cache_dir()) / "kernels"


@functools.cache
def loaded() -> Loaded:
    """The kernels, registered with XLA; or why there are none, after one warning."""
    try:
        path = builder.build(library_folder())
        return Loaded(library=load(path), path=path)
    except (builder.BuildError, NoHomeError) as error:
        reason = str(error)
    except OSError as error:
        reason = f"{error}. Set --cache_dir or XDG_CACHE_HOME to a folder that libraries can be kept in and loaded from"
    logger.warning("the kernels for CPUs are not there, so XLA's own code runs, many times slower: %s", reason)
    return Loaded(error=reason)


def library() -> ctypes.CDLL | None:
    """The kernels, registered with XLA; None, after one warning, where they cannot be had."""
    return loaded().library


def _required() -> ctypes.CDLL:
    found = library()
    if found is None:
        raise NotImplementedError("the kernels for CPUs are not there")
    return found


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


def compiler() -> str:
    """The compiler that made the kernels, and its version.

    Raises:
      NotImplementedError: if there are no kernels.
    """
    name: bytes = _required().jetserve_compiler()
    return name.decode()


def require_one_device() -> None:
    """For operations whose arguments would have to be gathered from several devices.

    Raises:
      NotImplementedError: if there are no kernels, or more than one device.
    """
    _required()
    if jax.device_count() > 1:
        raise NotImplementedError("the arrays may be spread over several devices")
