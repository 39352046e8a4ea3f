"""What a load test is asked to do: plain values, checked."""

import dataclasses
import math
from pathlib import Path

from jetserve.loadtest.workload import Lengths
from jetserve.types import SamplingParams

DEFAULT_REQUESTS = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class Goals:
    """What a request must meet to count into the goodput, in milliseconds; None is no goal."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    latency_ms: float | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"goal_{field.name} is {value}; expected a finite number above 0")

    @property
    def are_set(self) -> bool:
        return any(value is not None for value in dataclasses.astuple(self))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Server:
    """Where requests go. `url` is grpc://host:port, grpcs://…, http://… or https://…; `token` a bearer token.

    `tls_ca_file`: PEM certificates to trust, None for the system's. `model`: the name that OpenAI's API wants, None for
    the first that the server has.
    """

    url: str
    token: str | None = None
    tls_ca_file: Path | None = None
    model: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadTestConfig:
    """A load test.

    Exactly one of `request_rate` (a second, arrivals of a Poisson process) and `concurrency` (so many at once, the next
    as one ends). `num_requests` or `duration` seconds of arrivals, whichever is over first; neither is all prompts of
    the file once, or `DEFAULT_REQUESTS`. Prompts come from `prompts_file`, or are random tokens of `input_tokens`, and
    then `output_tokens` is the length of every answer; with a file it is None, or replaces what the file says.
    `warmup_requests` are sent before, and not counted. A request fails after `timeout_seconds`.
    """

    server: Server
    request_rate: float | None = None
    concurrency: int | None = None
    num_requests: int | None = None
    duration: float | None = None
    prompts_file: Path | None = None
    input_tokens: Lengths | None = None
    output_tokens: Lengths | None = None
    sampling: SamplingParams
    seed: int = 0
    warmup_requests: int = 0
    timeout_seconds: float = 600.0
    goals: Goals = Goals()
    plot: Path | None = None
    output_file: Path | None = None

    def __post_init__(self) -> None:
        if (self.request_rate is None) == (self.concurrency is None):
            found = "neither" if self.concurrency is None else "both"
            raise ValueError(f"found {found} of --request_rate and --concurrency; expected exactly one")
        for name in ("request_rate", "duration", "timeout_seconds"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"--{name} is {value}; expected a finite number above 0")
        if self.prompts_file is not None and self.input_tokens is not None:
            raise ValueError("--input_tokens has no effect on the prompts of --prompts_file; drop one of the two")
