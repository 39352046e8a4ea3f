"""Standard input and output of a chat: reading messages, loading with progress, what Ctrl-C means at the prompt.

Knows nothing of how answers come about.
"""

import dataclasses
import importlib.util
import io
import os
import sys
import time
from collections.abc import Callable

import tqdm
from rich.console import Console

from jetserve.config import EngineConfig, InteractiveConfig, ModelSource
from jetserve.engine import build
from jetserve.engine.engine import Engine
from jetserve.interactive.chat import COMMANDS, Chat, Outcome

PROMPT = "> "
CONTINUATION = ". "

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130

ReadLine = Callable[[str], str]
"""Like `input`: takes a prompt, returns a line without its end, raises EOFError after the last."""


def read_message(read_line: ReadLine) -> str:
    """One message of one or more lines. The end of input ends the message too.

    Raises:
      EOFError: if there is none left.
    """
    lines = [read_line(PROMPT)]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        try:
            lines.append(read_line(CONTINUATION))
        except EOFError:
            break
    return "\n".join(lines).strip()


def talk(chat: Chat, read_line: ReadLine, *, is_terminal: bool) -> int:
    """Handles messages until the user leaves, and returns the exit code.

    From a terminal that is 0. From a pipe it is `EXIT_FAILED` if any message had no answer, and Ctrl-C ends it all.
    """
    failed = interrupted = False
    while True:
        try:
            message = read_message(read_line)
            interrupted = False
            outcome = chat.handle(message) if message else Outcome.DONE
        except EOFError:
            if is_terminal:
                chat.status("")  # the shell's prompt then starts a line of its own
            break
        except KeyboardInterrupt:
            if not is_terminal:
                return EXIT_INTERRUPTED
            if interrupted:
                break
            interrupted = True
            chat.status("\nType /quit, or press Ctrl-C again, to leave.")
            continue
        failed |= outcome is Outcome.FAILED
        if outcome is Outcome.QUIT:
            break
        if outcome is Outcome.STOPPED and not is_terminal:
            return EXIT_INTERRUPTED
    return EXIT_FAILED if failed and not is_terminal else 0


def _line_reader(*, is_terminal: bool) -> ReadLine:
    """Reads standard input: with line editing in a terminal, without prompts from a pipe."""
    if is_terminal and sys.stdout.isatty():
        if importlib.util.find_spec("readline"):
            importlib.import_module("readline")  # `input` then uses it
        return input

    def read_line(prompt: str) -> str:
        if is_terminal:
            print(prompt, end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\r\n")

    return read_line


def _load(source: ModelSource, config: EngineConfig, max_length: int | None, status: Callable[[str], None]) -> Engine:
    """An engine for one conversation, saying what is loaded as what."""
    status(f"Loading {build.model_name(source)} …")
    started = time.monotonic()
    build.use_cache_dir(source.cache_dir)
    config = dataclasses.replace(config, max_sequences=1)
    loaded = build.load_source(
        source,
        config,
        progress=lambda work: tqdm.tqdm(work, desc="Loading", unit="tensor", leave=False, disable=None),
    )
    engine = build.make_engine(loaded, config, max_length=max_length)
    report = loaded.report
    groups = sorted(report.by_type().items(), key=lambda item: -item[1].weights)
    types = " + ".join(f"{group.weights / 1e6:.3g}M {name}" for name, group in groups)
    status(
        f"Weights: {types}, {report.bits_per_weight:.2f} bits each ({report.nbytes / 1e6:.0f} MB).\n"
        f"Loaded in {time.monotonic() - started:.1f} s. A conversation has up to {engine.max_length} tokens."
    )
    return engine


def run(
    config: InteractiveConfig, source: ModelSource, engine_config: EngineConfig, *, max_length: int | None = None
) -> int:
    """Loads a model and chats over standard input and output, until the user leaves or the input ends.

    Args:
      config: the first system message, and how to sample.
      source: the model.
      engine_config: limits; there is one sequence at a time, whatever it says.
      max_length: tokens of the whole conversation, None for what the model was made for (at most 2048).

    Returns:
      The exit code, as `talk` says it; `EXIT_FAILED` too if nobody reads the output any more.

    Raises:
      ValueError, RuntimeError, OSError: if the model cannot be loaded, or takes no system message.
    """
    console = Console(stderr=True, highlight=False)
    is_terminal = sys.stdin.isatty()

    def status(text: str) -> None:
        console.print(text, style="dim", markup=False, emoji=False, soft_wrap=True)

    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace")):
        # Bytes that are no text come in as surrogates, which the tokenizer refuses; characters that the terminal
        # lacks go out as "?".
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)
    chat = Chat(
        _load(source, engine_config, max_length, status),
        config.sampling,
        system=config.system,
        output=sys.stdout,
        status=status,
    )
    if is_terminal:
        status("Compiling the first programs; the next start finds them in the cache …")
        started = time.monotonic()
        chat.warm_up()
        status(f"Ready after {time.monotonic() - started:.1f} s. Commands: {COMMANDS}")
    else:  # nobody waits at a prompt, so nothing is compiled but what the answers need
        status("The first answers wait for their programs to be compiled, or to be read from the cache.")
    try:
        return talk(chat, _line_reader(is_terminal=is_terminal), is_terminal=is_terminal)
    except BrokenPipeError:
        # Python flushes once more as it exits, and would complain about the pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
