"""What answers requests once a model is loaded, and how a request gets its tokens into it."""

import dataclasses
import hashlib
import time
import uuid
from collections.abc import Sequence

import jetserve
from jetserve.engine.async_engine import AsyncEngine
from jetserve.server.observe import Observer
from jetserve.server.openai.errors import InvalidRequestError, shown
from jetserve.tokenizer import Tokenizer
from jetserve.types import Request, SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend:
    """An engine, what its model is called, and who watches."""

    engine: AsyncEngine
    observer: Observer
    model: str
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    @property
    def tokenizer(self) -> Tokenizer:
        return self.engine.engine.tokenizer

    @property
    def max_length(self) -> int:
        """Tokens of a prompt and its answer together."""
        return self.engine.engine.max_length

    @property
    def fingerprint(self) -> str:
        """Of what decides an answer, as far as a server can tell: OpenAI's `system_fingerprint`."""
        text = f"{jetserve.__version__} {self.model}"
        return f"fp_{hashlib.sha256(text.encode()).hexdigest()[:10]}"

    def check_model(self, name: str | None) -> None:
        """Raises InvalidRequestError for a name that is not the model's; none is needed."""
        if name not in (None, self.model):
            raise InvalidRequestError(
                f"model is {shown(name)}; expected {self.model!r}", param="model", code="model_not_found", status=404
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """One request of a client. `uid` is unlike any other's; `arrival` in seconds of `time.monotonic`."""

    backend: Backend
    arrival: float
    uid: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)

    def requests(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        *,
        priority: int | None,
        timeout: float | None,
        param: str,
    ) -> tuple[Request, ...]:
        """One for each prompt. Raises InvalidRequestError, blaming `param`, for prompts that can never be answered."""
        engine = self.backend.engine.engine
        limit, flag = engine.max_length, engine.scheduler.max_length_flag
        for prompt in prompts:
            if len(prompt) >= limit:
                raise InvalidRequestError(
                    f"{param} has {len(prompt)} tokens; expected at most {limit - 1}, so that one more fits in {limit}:"
                    f" shorten it, or have the server started with a larger {flag}",
                    param=param,
                    code="context_length_exceeded",
                )
        most = engine.config.max_queue
        if len(prompts) * sampling.n > most:
            raise InvalidRequestError(
                f"the request has {len(prompts)} prompts with n={sampling.n}; expected at most {most} answers, which is"
                " what the queue holds: send several requests",
                param="n",
            )
        if timeout is not None and not 0 < timeout < float("inf"):
            raise InvalidRequestError(f"timeout is {timeout}; expected a finite number above 0", param="timeout")
        return tuple(
            Request(
                request_id=self.uid if len(prompts) == 1 else f"{self.uid}-{index}",
                prompt_token_ids=tuple(prompt),
                sampling=sampling,
                priority=priority or 0,
                deadline=None if timeout is None else self.arrival + timeout,
                arrival_time=self.arrival,
            )
            for index, prompt in enumerate(prompts)
        )
