"""Traces of what the devices do, for `xprof` and Perfetto, started and stopped while requests run."""

import threading
import time
from pathlib import Path

import jax


class ProfilerStateError(RuntimeError):
    """A trace is started while one runs, or stopped while none does."""


class Profiler:
    """Writes each trace into a new folder below `folder`. May be used from several threads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._running: Path | None = None

    def start(self) -> Path:
        """Starts a trace, and returns where it will be. Raises ProfilerStateError if one runs."""
        with self._lock:
            if self._running is not None:
                raise ProfilerStateError(f"a trace into {self._running} runs already; stop it first")
            path = self._folder / time.strftime("%Y%m%d-%H%M%S")
            path.mkdir(parents=True, exist_ok=True)
            jax.profiler.start_trace(path)
            self._running = path
            return path

    def stop(self) -> Path:
        """Ends the trace, and returns where it is. Raises ProfilerStateError if none runs."""
        with self._lock:
            if self._running is None:
                raise ProfilerStateError("no trace runs; start one first")
            path, self._running = self._running, None
            jax.profiler.stop_trace()
            return path
