"""A gate in front of the tiny model's steps, for tests of what happens while one is held, or fails."""

import threading
from typing import Any

import pytest
from grpc_parts import TIMEOUT, runner


class Gate:
    """Holds the steps of an engine, or makes them fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.entered, self.fail = threading.Event(), threading.Event(), False
        real = runner().run

        def run(*args: Any) -> Any:
            self.entered.set()
            assert self.open.wait(TIMEOUT)
            if self.fail:
                raise RuntimeError("injected")
            return real(*args)

        monkeypatch.setattr(runner(), "run", run)
