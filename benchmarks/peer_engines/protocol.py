"""How `benchmarks/peers.py` talks to an engine, which runs in a process, and an environment, of its own.

A command is a line of JSON on standard input, `{"command": name, ...arguments}`; its answer is a line of JSON on
standard output. The first line out, without a command, says that the engine is ready. Imports nothing but the standard
library, and is written for all Pythons that a peer may need.
"""

import abc
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

Token = int


class PeerEngine(abc.ABC):
    """What is measured. Sequences are greedy and never end by themselves; no prompt profits from an earlier one."""

    version: str
    """Of the engine, and the settings that matter."""

    @abc.abstractmethod
    def start(self, prompts: Sequence[Sequence[Token]], tokens: int) -> None:
        """Takes prompts in, none of whose tokens is computed yet. Each is to be continued by at least `tokens`."""

    @abc.abstractmethod
    def step(self) -> list[Token | None]:
        """One step of all sequences: the new token of each, or None where there is none yet."""

    @abc.abstractmethod
    def end(self) -> None:
        """Forgets all sequences."""

    def encode(self, text: str) -> list[Token]:
        raise NotImplementedError

    def decode(self, tokens: Sequence[Token]) -> str:
        raise NotImplementedError


def first_token(engine: PeerEngine, prompt: Sequence[Token]) -> float:
    """Seconds from the arrival of one prompt to its first token."""
    begin = time.perf_counter()
    engine.start([prompt], 1)
    while engine.step() == [None]:
        pass
    seconds = time.perf_counter() - begin
    engine.end()
    return seconds


def decode_step(engine: PeerEngine, prompts: Sequence[Sequence[Token]], steps: int) -> float:
    """Seconds of a step in which all sequences decode, on average."""
    engine.start(prompts, steps + 1)
    started = [False] * len(prompts)
    while not all(started):
        started = [old or new is not None for old, new in zip(started, engine.step())]  # noqa: B905
    begin = time.perf_counter()
    for _ in range(steps):
        if None in engine.step():
            raise RuntimeError("a sequence had no token in a step of decoding")
    seconds = (time.perf_counter() - begin) / steps
    engine.end()
    return seconds


def answer(engine: PeerEngine, prompt: Sequence[Token], count: int) -> list[Token]:
    """The greedy continuation of one prompt."""
    engine.start([prompt], count)
    found: list[Token] = []
    while len(found) < count:
        found += [token for token in engine.step() if token is not None]
    engine.end()
    return found


def serve(make: Callable[..., PeerEngine]) -> None:
    """Makes the engine from the JSON object in the first argument, then answers commands until the input ends."""
    # Libraries write to standard output: it becomes standard error for them, and the protocol keeps the real one.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    engine = make(**json.loads(sys.argv[1]))
    first_token(engine, [1, 2, 3, 4])
    print(json.dumps({"ready": engine.version}), file=out)
    for line in sys.stdin:
        message: dict[str, Any] = json.loads(line)
        name = message.pop("command")
        commands: dict[str, Callable[..., Any]] = {
            "first_token": lambda prompt: first_token(engine, prompt),
            "decode_step": lambda prompts, steps: decode_step(engine, prompts, steps),
            "answer": lambda prompt, count: answer(engine, prompt, count),
            "encode": engine.encode,
            "decode": engine.decode,
            "peak_memory": lambda: 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        }
        print(json.dumps({"result": commands[name](**message)}), file=out)
