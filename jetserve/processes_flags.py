"""The command line of several processes that serve one model together, in `flags`' way."""

from typing import Any

from absl import flags

from jetserve.config import ProcessesConfig
from jetserve.flags import FLAGS, define

NAMES = ("coordinator_address", "num_processes", "process_id")


def define_processes() -> None:
    """Which of several processes this is."""
    define(
        flags.DEFINE_string,
        "coordinator_address",
        None,
        "HOST:PORT of process 0, the same on all, to run one model on several hosts: see docs/tpu.md.",
    )
    define(flags.DEFINE_integer, "num_processes", None, "Processes in all, one a host.", lower_bound=1)
    define(flags.DEFINE_integer, "process_id", None, "Of this one; 0 takes the requests.", lower_bound=0)


def processes_config() -> ProcessesConfig | None:
    """From `define_processes`; None for a process alone.

    Raises:
      ValueError: if some are missing, or contradict each other.
    """
    found: dict[str, Any] = {name: FLAGS[name].value for name in NAMES if FLAGS[name].value is not None}
    if not found:
        return None
    if len(found) < len(NAMES):
        missing = ", ".join(f"--{name}" for name in NAMES if name not in found)
        raise ValueError(f"{missing} is missing; expected all of {', '.join(f'--{name}' for name in NAMES)}, or none")
    return ProcessesConfig(**found)
