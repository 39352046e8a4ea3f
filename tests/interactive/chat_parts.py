"""What the chat's tests share: a model that never ends an answer, a screen, and a keyboard."""

import io
import json
from collections.abc import Callable
from pathlib import Path

import jax
from safetensors.numpy import load_file, save_file

from jetserve.config import EngineConfig, SamplingDefaults
from jetserve.engine.engine import Engine
from jetserve.interactive.chat import Chat
from jetserve.testing import make_tiny_checkpoint

LIMIT = 256
CONFIG = EngineConfig(max_sequences=1, max_step_tokens=64)


def cache_dir() -> Path:
    """Where this test session keeps compiled programs."""
    return Path(jax.config.jax_compilation_cache_dir).parent


def make_endless(folder: Path) -> Path:
    """A tiny model that never ends an answer by itself, nor emits any other special token."""
    make_tiny_checkpoint(folder, max_position_embeddings=4096)
    weights = load_file(folder / "model.safetensors")
    for token in json.loads((folder / "tokenizer.json").read_text())["added_tokens"]:
        weights["lm_head.weight"][token["id"]] = 0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class Screen(io.StringIO):
    """Takes answers and status lines; `interrupt_at` is the number of the write that Ctrl-C comes in."""

    def __init__(self, *, is_terminal: bool = False, interrupt_at: int | None = None) -> None:
        super().__init__()
        self.notes: list[str] = []
        self.interrupt_at = interrupt_at
        self._is_terminal = is_terminal
        self._writes = 0

    def isatty(self) -> bool:
        return self._is_terminal

    def write(self, text: str) -> int:
        self._writes += 1
        if self._writes == self.interrupt_at:
            raise KeyboardInterrupt
        return super().write(text)


def make_chat(engine: Engine, screen: Screen, *, max_tokens: int | None = 8, system: str | None = None) -> Chat:
    sampling = SamplingDefaults(max_tokens=max_tokens)
    return Chat(engine, sampling, system=system, output=screen, status=screen.notes.append)


def reader(*items: str | type[BaseException]) -> Callable[[str], str]:
    """`input` that gives these lines, or raises these exceptions."""
    left = list(items)

    def read_line(prompt: str) -> str:
        if not left:
            raise EOFError
        item = left.pop(0)
        if isinstance(item, str):
            return item
        raise item

    return read_line
