"""Builds the library of C++ kernels with the system's compiler, once for all processes, and keeps it.

Owns the folder of built libraries. A library is called `kernels-INPUTS-COMPILER-CONTENTS.so` after three digests: of
all that goes into it but the compiler, of what the compiler says of itself, and of the file. So one that was cut short
is told from a whole one, and one that was built elsewhere is found where there is no compiler. Knows nothing of what
the kernels compute, nor of how they are loaded.
"""

import dataclasses
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jaxlib

from jetserve import making

logger = logging.getLogger(__name__)

COMPILERS = ("c++", "g++", "clang++")
"""Tried in turn, unless `CXX` names one."""
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-ffp-contract=fast", "-fno-math-errno")
COMMAND_SECONDS = 1800
"""Of one command of the compiler, on a machine that is busy with much else."""
KEPT = 8
"""Libraries in the folder, the newest: of other versions, compilers and processors. Who lacks one builds it again."""
MESSAGE_LINES = 5
"""Of the compiler's last ones, that an error repeats."""


class BuildError(RuntimeError):
    """The kernels cannot be compiled: says why, and what to install."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiler:
    """A command that compiles C++, and what it says about itself."""

    command: tuple[str, ...]
    version: str

    @property
    def digest(self) -> str:
        return _digest(self.version, *self.command[1:])


def _digest(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update((part.encode() if isinstance(part, str) else part) + b"\0")
    return digest.hexdigest()[:16]


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


def march_flag() -> str:
    """The compiler's flag for all that this processor can do."""
    return "-mcpu=native" if platform.machine() == "aarch64" else "-march=native"


def compiler() -> Compiler:
    """The first compiler that works. Raises BuildError if there is none."""
    working, failures = _compilers()
    if not working:
        raise BuildError("; ".join(failures))
    return working[0]


def _compilers() -> tuple[list[Compiler], list[str]]:
    """Those that answer, and what is wrong with the others."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    distinct: dict[str, str] = {}  # c++ is often g++ by another name: what one fails at, the other does too
    for path in filter(None, map(shutil.which, COMPILERS)):
        distinct.setdefault(os.path.realpath(path), path)
    commands = [chosen] if chosen else [[path] for path in distinct.values()]
    working, failures = [], []
    for command in commands:
        try:
            answer = _run([*command, "--version"])
        except BuildError as error:
            failures.append(str(error))
        else:
            working.append(Compiler(command=tuple(command), version=(answer.stdout or answer.stderr).strip()))
    if not working:
        known = f"expected one of {', '.join(COMPILERS)}, or another that CXX names. Install g++ or clang"
        failures.append(f"no C++ compiler was found that works; {known}")
    return working, failures


def compile_command(compiler: Compiler, source: Path, *flags: str) -> list[str]:
    """Compiles one file for this processor unless flags say otherwise."""
    return [*compiler.command, *FLAGS, march_flag(), *flags, "-isystem", jax.ffi.include_dir(), "-c", str(source)]


def build(folder: Path, *, extra_flags: tuple[str, ...] = ()) -> Path:
    """The path of a library in `folder`, made unless it is there.

    Of the compilers, the first that works makes it. Where none does, what any made of the same sources will do. Safe
    when several processes build at once: one does, and the others wait for it.

    Raises:
      BuildError: if there is no library, and no compiler that makes one.
      OSError: if nothing can be kept in the folder.
    """
    inputs = _digest(processor(), jaxlib.__version__, *FLAGS, *extra_flags, *(s.read_bytes() for s in sources()))
    working, failures = _compilers()
    for compiler in working:
        if (path := _find(folder, inputs, compiler.digest)) is not None:
            return path
    for compiler in working:
        try:
            return _build_once(folder, inputs, compiler, extra_flags)
        except BuildError as error:
            failures.append(str(error))
    if (path := _find(folder, inputs)) is not None:
        return path
    failures += [f"{path} is damaged" for path in _named(folder, inputs)]
    raise BuildError("; ".join(failures))


def _named(folder: Path, *digests: str) -> list[Path]:
    """Libraries whose names begin with these digests, the newest first."""
    found = folder.glob("-".join(("kernels", *digests, "*.so")))
    return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)


def _find(folder: Path, *digests: str) -> Path | None:
    return next((path for path in _named(folder, *digests) if _is_whole(path)), None)


def _is_whole(path: Path) -> bool:
    return path.stem.rsplit("-", 1)[-1] == _digest(path.read_bytes())


def _build_once(folder: Path, inputs: str, compiler: Compiler, flags: tuple[str, ...]) -> Path:
    with making.room(folder, f"building the kernels for CPUs in {folder}") as room:
        for path in _named(folder, inputs, compiler.digest):
            if _is_whole(path):
                return path
            logger.warning("%s is damaged, so the kernels for CPUs are built again", path)
            path.unlink()
        logger.info("building the kernels for CPUs in %s, once: about half a minute", folder)
        made = _compile(room, compiler, flags)
        path = folder / f"kernels-{inputs}-{compiler.digest}-{_digest(made.read_bytes())}.so"
        os.replace(made, path)
        for old in _named(folder)[KEPT:]:
            old.unlink()
    return path


def _compile(room: Path, compiler: Compiler, flags: tuple[str, ...]) -> Path:
    """The library made in `room`, on disk. The files are compiled at the same time."""
    units = [source for source in sources() if source.suffix == ".cc"]
    objects = [str(room / f"{unit.stem}.o") for unit in units]
    commands = [
        [*compile_command(compiler, unit, *flags), "-o", made] for unit, made in zip(units, objects, strict=True)
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(_run, commands))
    library = room / "kernels.so"
    _run([*compiler.command, *flags, "-shared", *objects, "-o", str(library)])
    with library.open("rb") as file:
        os.fsync(file.fileno())
    return library


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Raises BuildError, with the compiler's last lines, if the command fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False, timeout=COMMAND_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} did not end within {COMMAND_SECONDS // 60} minutes") from error
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be run: {error.strerror}") from error
    if done.returncode:
        lines = "\n".join(done.stderr.strip().splitlines()[-MESSAGE_LINES:])
        raise BuildError(f"{command[0]} failed with status {done.returncode}: {lines or 'it said nothing'}")
    return done
