"""The chat as a process: piped, and in a pseudo-terminal."""

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from chat_parts import LIMIT, Screen, cache_dir, make_chat

from jetserve.engine.engine import Engine
from jetserve.interactive.terminal import EXIT_FAILED

pytestmark = pytest.mark.slow

SCRIPT = """
import signal, sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)
from jetserve import interactive
from jetserve.config import EngineConfig, InteractiveConfig, ModelSource, SamplingDefaults
checkpoint, cache, max_length, max_tokens, quantize_type = sys.argv[1:]
sys.exit(interactive.run(
    InteractiveConfig(sampling=SamplingDefaults(max_tokens=int(max_tokens) or None)),
    ModelSource(checkpoint_path=checkpoint, cache_dir=Path(cache), quantize_type=quantize_type),
    EngineConfig(max_step_tokens=64),
    max_length=int(max_length),
))
"""


def start(
    checkpoint: Path, *, max_length: int, max_tokens: int, quantize_type: str = "none", **streams: int
) -> subprocess.Popen:
    arguments = [str(checkpoint), str(cache_dir()), str(max_length), str(max_tokens), quantize_type]
    environment = {**os.environ, "TERM": "xterm", "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    return subprocess.Popen([sys.executable, "-c", SCRIPT, *arguments], env=environment, **streams)


def piped(checkpoint: Path, text: bytes, **settings: int) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    pipe = subprocess.PIPE
    with start(checkpoint, stdin=pipe, stdout=pipe, stderr=pipe, **settings) as process:
        output, errors = process.communicate(text, timeout=300)
    return process.returncode, output.decode(), errors.decode()


class Terminal:
    """The other end of a pseudo-terminal."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._unread = ""

    def type(self, text: str) -> None:
        os.write(self.descriptor, text.encode())

    def _read(self, deadline: float) -> None:
        ready, _, _ = select.select([self.descriptor], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"the terminal went silent after {self._unread!r}"
        self._unread += os.read(self.descriptor, 4096).decode(errors="replace")

    def wait_for(self, text: str, seconds: float = 120) -> str:
        """Everything up to the text."""
        deadline = time.monotonic() + seconds
        while text not in self._unread:
            self._read(deadline)
        before, self._unread = self._unread.split(text, 1)
        return before

    def wait_for_more(self, characters: int, seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while len(self._unread) < characters:
            self._read(deadline)


def test_piped_input(checkpoint: Path, engine: Engine, screen: Screen) -> None:
    code, output, errors = piped(
        checkpoint, b"Hello\n/stats\n//slash\r\nlast line without its end", max_length=LIMIT, max_tokens=8
    )
    assert code == 0, errors
    chat = make_chat(engine, screen)
    for message in ("Hello", "//slash", "last line without its end"):
        chat.handle(message)
    assert output == screen.getvalue()
    assert errors.count("first after") == 3
    assert "conversation: 1 turns" in errors
    assert " float32, 32.00 bits each" in errors
    assert "\x1b" not in output + errors
    assert "> " not in output + errors


def test_bytes_that_are_no_text(checkpoint: Path) -> None:
    code, output, errors = piped(checkpoint, b"caf\xe9\n/\xe9\nHello\n", max_length=LIMIT, max_tokens=8)
    assert code == EXIT_FAILED
    assert errors.count("first after") == 1
    assert output


def test_a_closed_output_ends_it_quietly(checkpoint: Path) -> None:
    pipe = subprocess.PIPE
    with start(checkpoint, stdin=pipe, stdout=pipe, stderr=pipe, max_length=LIMIT, max_tokens=8) as process:
        assert process.stdout is not None
        process.stdout.close()
        process.stdout = None
        _, errors = process.communicate(b"Hello\nHello\n", timeout=300)
    assert process.returncode == EXIT_FAILED
    assert b"Traceback" not in errors
    assert b"Exception ignored" not in errors


def test_terminal(checkpoint: Path) -> None:
    master, slave = pty.openpty()
    with start(checkpoint, stdin=slave, stdout=slave, stderr=slave, max_length=4096, max_tokens=0) as process:
        os.close(slave)
        terminal = Terminal(master)
        try:
            terminal.wait_for("Commands: /help")
            terminal.wait_for("> ")
            terminal.type("Hello\n")
            terminal.wait_for("Hello\r\n")
            terminal.wait_for_more(20)
            process.send_signal(signal.SIGINT)
            terminal.wait_for("stopped]")
            terminal.type("/stats\n")
            assert "conversation: 1 turns" in terminal.wait_for("pages: 0 of 256 in use")
            terminal.wait_for("> ")
            time.sleep(
                1
            )  # a signal between Python's printing of the prompt and its waiting comes only with the next key
            process.send_signal(signal.SIGINT)
            terminal.wait_for("Type /quit")
            terminal.type("/quit\n")
            assert process.wait(timeout=60) == 0
        finally:
            process.kill()
            os.close(master)


def test_the_default_model_knows_the_capital_of_france(default_gguf: Path) -> None:
    code, output, errors = piped(default_gguf, b"What is the capital of France?\n", max_length=512, max_tokens=32)
    assert code == 0, errors
    assert "Paris" in output
    assert "\n" not in output.strip()
