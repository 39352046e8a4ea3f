"""What a request is and what comes back: plain data shared by every layer above the models.

Knows nothing of jax, tokenizers or the network. Validation happens at construction, so that a value of these types is
always usable; the messages name the field, what was found and what was expected.
"""

import dataclasses
import enum
import math
import time
from collections.abc import Mapping

MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIAS = 300
MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 128
MAX_SAMPLES = 128
MAX_GUIDE_CHARACTERS = 65_536
"""Of a guide's source. The time to compile a schema grows with the square of its size, to seconds at this one."""


class FinishReason(enum.Enum):
    """Why a sequence ended. The values are OpenAI's where OpenAI has one."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"
    GUIDE = "guide"
    """The guide is at fault: it asks for what cannot come, or is too complex."""


class GuideKind(enum.Enum):
    """What an answer may be made to match. The values are the names of the fields that carry them."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"


class InvalidFieldError(ValueError):
    """`field` is to blame; `what` says of it what was found and what was expected."""

    def __init__(self, field: str, what: str) -> None:
        super().__init__(f"{field} {what}")
        self.field = field


class FieldError(InvalidFieldError):
    """`field` has a value that it cannot have."""

    def __init__(self, field: str, found: object, expected: str) -> None:
        super().__init__(field, f"is {found!r}; expected {expected}")


def _require(ok: bool, field: str, found: object, expected: str) -> None:
    if not ok:
        raise FieldError(field, found, expected)


def _require_at_most(limit: int, field: str, found: int, of_what: str) -> None:
    if found > limit:
        raise InvalidFieldError(field, f"has {found} {of_what}; expected at most {limit}")


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: object) -> bool:
    # An integer beyond float's range is finite and of no use: comparing is safe where math.isfinite would raise.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < math.inf


@dataclasses.dataclass(frozen=True, kw_only=True)
class Guide:
    """A form that the whole answer must have.

    `source`: a JSON schema as text, a regular expression in Rust's syntax, or a grammar in llguidance's kind of Lark;
    for `JSON_OBJECT` nothing. `field`: what who asks for it calls it, for messages; the kind's own name if it is empty.
    """

    kind: GuideKind
    source: str = ""
    field: str = dataclasses.field(default="", compare=False)

    def __post_init__(self) -> None:
        is_free = self.kind is GuideKind.JSON_OBJECT
        _require(
            isinstance(self.source, str) and is_free == (self.source == ""),
            self.name,
            self.source,
            "no source" if is_free else "a text that is not empty",
        )
        _require_at_most(MAX_GUIDE_CHARACTERS, self.name, len(self.source), "characters")

    @property
    def name(self) -> str:
        """The field to blame for what is wrong with it."""
        return self.field or self.kind.value


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled. Order of application: penalties and bias, guide, temperature, top-k, top-p, min-p.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 and `min_p` 0 are off. `logprobs` is the number of alternatives
    reported a token (0: only the chosen one; None: none at all). `seed` None draws one from the operating system.

    An answer with a `guide` ends where its form does, whatever `min_tokens` and `ignore_eos` say: those only keep it
    from ending where it may go on. It is cut by `max_tokens`, and by `stop` and `stop_token_ids`, like any other.
    """

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    guide: Guide | None = None
    n: int = 1

    def __post_init__(self) -> None:
        integer, finite = _is_integer, _is_finite
        _require(
            integer(self.max_tokens) and self.max_tokens >= 1,
            "max_tokens",
            self.max_tokens,
            "an integer of 1 or more",
        )
        _require(
            integer(self.min_tokens) and 0 <= self.min_tokens <= self.max_tokens,
            "min_tokens",
            self.min_tokens,
            f"an integer from 0 to max_tokens ({self.max_tokens})",
        )
        for field in ("temperature", "repetition_penalty", "top_p", "min_p"):
            _require(finite(getattr(self, field)), field, getattr(self, field), "a finite number")
        _require(0 <= self.temperature <= 100, "temperature", self.temperature, "0 to 100")
        _require(integer(self.top_k) and self.top_k >= 0, "top_k", self.top_k, "an integer of 0 (off) or more")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "more than 0, up to 1")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "0 to 1")
        _require(self.repetition_penalty > 0, "repetition_penalty", self.repetition_penalty, "more than 0")
        for field in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, field)
            _require(finite(value) and -2 <= value <= 2, field, value, "-2 to 2")
        _require(
            self.seed is None or (integer(self.seed) and -(2**63) <= self.seed < 2**64),
            "seed",
            self.seed,
            "a 64-bit integer or None",
        )
        _require_at_most(MAX_LOGIT_BIAS, "logit_bias", len(self.logit_bias), "entries")
        for token, bias in self.logit_bias.items():
            _require(integer(token) and token >= 0, "logit_bias", token, "token ids of 0 or more")
            _require(finite(bias) and -100 <= bias <= 100, f"logit_bias[{token}]", bias, "-100 to 100")
        _require(
            self.logprobs is None or (integer(self.logprobs) and 0 <= self.logprobs <= MAX_TOP_LOGPROBS),
            "logprobs",
            self.logprobs,
            f"an integer from 0 to {MAX_TOP_LOGPROBS}, or None",
        )
        _require(isinstance(self.stop, tuple), "stop", self.stop, "a tuple of strings")
        _require_at_most(MAX_STOP_STRINGS, "stop", len(self.stop), "strings")
        for text in self.stop:
            _require(isinstance(text, str) and text != "", "stop", text, "strings that are not empty")
        _require_at_most(MAX_STOP_TOKEN_IDS, "stop_token_ids", len(self.stop_token_ids), "ids")
        for token in self.stop_token_ids:
            _require(integer(token) and token >= 0, "stop_token_ids", token, "token ids of 0 or more")
        _require(isinstance(self.ignore_eos, bool), "ignore_eos", self.ignore_eos, "true or false")
        _require(self.guide is None or isinstance(self.guide, Guide), "guide", self.guide, "a Guide or None")
        _require(integer(self.n) and 1 <= self.n <= MAX_SAMPLES, "n", self.n, f"an integer from 1 to {MAX_SAMPLES}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt to continue.

    `priority`: lower runs first; equal priorities run in order of arrival. `deadline` and `arrival_time` are seconds of
    `time.monotonic`; a request that has not finished by its deadline ends with `FinishReason.DEADLINE`.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    priority: int = 0
    deadline: float | None = None
    arrival_time: float = dataclasses.field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        # It goes into logs and into headers.
        is_plain = self.request_id.isascii() and self.request_id.isprintable() and 0 < len(self.request_id) <= 128
        _require(is_plain, "request_id", self.request_id, "1 to 128 printable ASCII characters")
        if not self.prompt_token_ids:
            raise InvalidFieldError("prompt", "has no tokens; expected at least one")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """The natural-log probability of one chosen token and its best alternatives, by falling probability.

    Taken from the model's own distribution, before penalties, bias and temperature.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Usage:
    """Token counts of one request, in tokens. `cached_tokens` of the prompt came from the prefix cache."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """What one step brought for one sample (`index` in 0..n-1) of a request.

    `text`, `token_ids` and `logprobs` are what is new since the output before; text held back because it may be the
    start of a stop string or half a character comes later. The last output of a sample carries the finish reason.
    `started_time`: when the sample first ran, in seconds of `time.monotonic`; None if it never did.
    """

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    usage: Usage
    logprobs: tuple[TokenLogprobs, ...] = ()
    error: str | None = None
    started_time: float | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineStats:
    """State and totals of an engine since it started; counts unless the name says otherwise."""

    running: int
    waiting: int
    pages_used: int
    pages_total: int
    steps: int
    prompt_tokens: int
    output_tokens: int
    prefix_cache_hit_tokens: int
    preemptions: int
    finished: Mapping[FinishReason, int]
