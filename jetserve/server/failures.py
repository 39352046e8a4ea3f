"""Why a request fails: one list of reasons, which every protocol translates into its own statuses.

Knows nothing of protocols.
"""

import enum

from jetserve.engine.async_engine import DrainingError, EngineDeadError
from jetserve.engine.scheduler import QueueFullError
from jetserve.types import FinishReason, RequestOutput

RETRY_AFTER_SECONDS = 1
"""What a client is told to wait when the queue is full."""


class FailureKind(enum.Enum):
    """The values name them in metrics and logs."""

    INVALID = "invalid"
    QUEUE_FULL = "queue_full"
    UNAVAILABLE = "unavailable"
    DEADLINE = "deadline"
    DEAD = "dead"
    INTERNAL = "internal"


class RequestFailedError(Exception):
    """An answer that ended otherwise than by a STOP or a LENGTH of all its samples."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


_ENDS = {
    FinishReason.CANCELLED: (FailureKind.UNAVAILABLE, "the server stopped before the answer was complete"),
    FinishReason.DEADLINE: (FailureKind.DEADLINE, "the answer was not complete in time"),
    FinishReason.ERROR: (FailureKind.INTERNAL, "the engine failed"),
    FinishReason.GUIDE: (FailureKind.INVALID, "the guide cannot be followed"),
}


def check(output: RequestOutput) -> None:
    """Raises RequestFailedError for the last output of a sample that did not end well."""
    if output.finish_reason in _ENDS:
        kind, message = _ENDS[output.finish_reason]
        raise RequestFailedError(kind, output.error or message)


def kind_of(error: Exception) -> FailureKind:
    """What an exception that ended a request means."""
    match error:
        case RequestFailedError():
            return error.kind
        case QueueFullError():
            return FailureKind.QUEUE_FULL
        case ValueError():
            return FailureKind.INVALID
        case DrainingError():
            return FailureKind.UNAVAILABLE
        case EngineDeadError():
            return FailureKind.DEAD
        case _:
            return FailureKind.INTERNAL


def message_of(error: Exception) -> str:
    """What the client is told."""
    if kind_of(error) is FailureKind.INTERNAL and not isinstance(error, RequestFailedError):
        return f"{type(error).__name__}: {error}"
    return str(error)
