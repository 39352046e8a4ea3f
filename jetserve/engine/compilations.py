"""How many programs this process has had compiled, or read from the persistent cache.

A server that is warmed up must not need any more. Counts from the first call on, for the whole process, as jax does.
"""

import functools
import threading

import jax.monitoring

_EVENT = "/jax/core/compile/backend_compile_duration"


class _Counter:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.total = 0
        jax.monitoring.register_event_duration_secs_listener(self._take)

    def _take(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == _EVENT:
            with self._lock:
                self.total += 1


@functools.cache
def _counter() -> _Counter:
    return _Counter()


def count() -> int:
    """Programs since the first call, which returns 0."""
    return _counter().total
