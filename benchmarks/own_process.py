"""A function in a process of its own: a child's peak of memory starts from its parent's size, which must stay small."""

import multiprocessing
from collections.abc import Callable
from typing import Any


def run(function: Callable[..., None], *args: Any) -> None:
    """Calls `function(*args)`, and waits for it. Ends this process too if it fails."""
    process = multiprocessing.get_context("spawn").Process(target=function, args=args)
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"{function.__name__} failed with exit code {process.exitcode}; its error is above")
