"""Configuration of an engine: frozen, validated, plain data.

Knows nothing of flags (see `flags.py`), jax or files. Every field states its unit.
"""

import dataclasses
import enum
import math
import re
from pathlib import Path

from jetserve.method_config import ROUND_TO_NEAREST, AutoConfig, MethodConfig, check_positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """How many devices each mesh axis takes. `tensor` None means all that the other axes leave."""

    data: int = 1
    tensor: int | None = None
    expert: int = 1

    def __post_init__(self) -> None:
        check_positive("data", self.data)
        check_positive("expert", self.expert)
        if self.tensor is not None:
            check_positive("tensor", self.tensor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The paged KV cache.

    `page_size`: tokens a page. `num_pages`: pages in all; None means enough for every sequence at full length.
    `quantize`: int8 pages with a float32 scale per token and head. `prefix_caching`: share pages of equal prefixes.
    """

    page_size: int = 16
    num_pages: int | None = None
    quantize: bool = False
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        check_positive("page_size", self.page_size)
        if self.num_pages is not None:
            check_positive("num_pages", self.num_pages)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Limits of an engine.

    `max_sequences`: sequences run at once (the flag --batch_size). `max_length`: tokens of prompt and answer together
    (--max_cache_length). `max_step_tokens`: the token budget of one step; longer prompts are prefilled in chunks of it.
    `max_queue`: requests that wait before `submit` refuses more. `dtype`: of activations, "float32" or "bfloat16".
    """

    max_sequences: int = 8
    max_length: int = 2048
    max_step_tokens: int = 512
    max_queue: int = 1024
    dtype: str = "float32"
    cache: CacheConfig = CacheConfig()
    mesh: MeshConfig = MeshConfig()

    def __post_init__(self) -> None:
        for name in ("max_sequences", "max_length", "max_step_tokens", "max_queue"):
            check_positive(name, getattr(self, name))
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype is {self.dtype!r}; expected float32 or bfloat16")
        if self.max_step_tokens < self.max_sequences:
            raise ValueError(
                f"max_step_tokens ({self.max_step_tokens}) is below max_sequences ({self.max_sequences}): every running"
                " sequence takes at least one token a step; raise max_step_tokens or lower the batch size"
            )

    @property
    def pages_per_sequence(self) -> int:
        return -(-self.max_length // self.cache.page_size)

    @property
    def num_pages(self) -> int:
        """Pages that the allocator hands out. The device holds one more, page 0, that takes padding's writes."""
        return self.cache.num_pages or self.max_sequences * self.pages_per_sequence


CPU_ACTIVATIONS = ("int8", "float32")
EXPORT_FORMATS = ("gptq", "compressed-tensors")
"""Of other projects, that weights can be written in."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Which model to load, and as what.

    `checkpoint_path`: a converted checkpoint, a Hugging Face folder, a GGUF file or a hub id; None is the default
    model. `model_name` and `size`: of a preset (`models.presets`), with random weights where there is no checkpoint,
    and what one must agree with where there is. `tokenizer_path`: a folder or file that takes the place of the
    checkpoint's own tokenizer. `quantize_type`: one of the four types, "none" or "keep"; None is the checkpoint's
    own. `block_size`: weights a scale, for blockwise types. `symmetric`: None is the checkpoint's own, symmetric when
    quantizing. `quantize_recipe`: a file of rules for single tensors. `quantize_activation`: int8 activations in
    matmuls with quantized weights. `cpu_activation`: "int8" lets the CPU kernels quantize activations, a scale for
    every 32; "float32" leaves them exact. `cache_dir`: where fetched models, compiled programs and CPU kernels
    are kept.
    """

    checkpoint_path: str | None = None
    model_name: str | None = None
    size: str | None = None
    tokenizer_path: str | None = None
    quantize_type: str | None = None
    block_size: int | None = None
    symmetric: bool | None = None
    quantize_recipe: Path | None = None
    quantize_activation: bool = False
    cpu_activation: str = "int8"
    cache_dir: Path

    def __post_init__(self) -> None:
        if self.cpu_activation not in CPU_ACTIVATIONS:
            raise ValueError(f"cpu_activation is {self.cpu_activation!r}; expected {' or '.join(CPU_ACTIVATIONS)}")
        if self.quantize_activation and self.cpu_activation == "float32":
            raise ValueError("quantize_activation contradicts cpu_activation float32; drop one of the two")
        if (self.model_name is None) != (self.size is None):
            raise ValueError(
                f"model_name is {self.model_name} and size is {self.size}; expected both (llama-2 and 7b) or none"
            )
        if self.model_name is not None and self.checkpoint_path is None and self.quantize_recipe is not None:
            raise ValueError("quantize_recipe is for checkpoints, but the weights of a preset are random; drop it")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingDefaults:
    """Sampling where a prompt does not say otherwise. `max_tokens` None leaves it to the task."""

    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfflineConfig:
    """What `run_offline.py` does: `task` is "generate", "perplexity" or "benchmark".

    generate: `prompts_file` and `output_file`. perplexity: `text_file`, in windows of `window` tokens, the first
    `sampling.max_tokens` tokens of it, against `reference_checkpoint` if given. benchmark: `input_tokens` and
    `output_tokens` a sequence, at the engine's batch size.
    """

    task: str
    prompts_file: Path | None = None
    output_file: Path | None = None
    text_file: Path | None = None
    window: int = 1024
    reference_checkpoint: str | None = None
    input_tokens: int = 512
    output_tokens: int = 128
    sampling: SamplingDefaults = SamplingDefaults()


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """Tasks of lm-eval.

    `include_path`: a folder with further ones. `num_fewshot`: examples in a prompt; None is the task's. `limit`:
    documents of each; None is all.
    """

    tasks: tuple[str, ...]
    include_path: Path | None = None
    num_fewshot: int | None = None
    limit: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """What `python -m jetserve.evaluate` measures of every model: a text, tasks, or both; and the files it writes.

    `window` and `max_tokens` of `text_file`, and `reference_checkpoint`, are as in `OfflineConfig`.
    """

    text_file: Path | None = None
    window: int = 1024
    max_tokens: int | None = None
    reference_checkpoint: str | None = None
    tasks: TaskSettings | None = None
    output_file: Path | None = None
    plot: Path | None = None

    def __post_init__(self) -> None:
        if self.text_file is None and self.tasks is None:
            raise ValueError("neither text_file nor tasks are set; expected a text, tasks, or both")
        if self.plot is not None and self.text_file is None:
            raise ValueError("a plot is of perplexity, which takes a text_file; set it")


@dataclasses.dataclass(frozen=True, kw_only=True)
class InteractiveConfig:
    """What `run_interactive.py` starts with: a system message, and how answers are sampled."""

    system: str | None = None
    sampling: SamplingDefaults = SamplingDefaults()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessesConfig:
    """One of several processes, each on a host of its own, that run one model together.

    `coordinator_address`: HOST:PORT of process 0, where it waits for the others. `process_id`: 0 takes the requests.
    """

    coordinator_address: str
    num_processes: int
    process_id: int

    def __post_init__(self) -> None:
        check_positive("num_processes", self.num_processes)
        if not 0 <= self.process_id < self.num_processes:
            raise ValueError(f"process_id is {self.process_id}; expected 0 to {self.num_processes - 1}")
        host, _, port = self.coordinator_address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise ValueError(f"coordinator_address is {self.coordinator_address!r}; expected HOST:PORT of process 0")


class LogFormat(enum.Enum):
    """How a server writes its log: for people, or a JSON object a line."""

    TEXT = "text"
    JSON = "json"


_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\sA-Z]+")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Where and how `run_server.py` serves.

    `grpc_port`, `http_port`: 0 lets the system choose one, None serves nothing there. `drain_seconds`: what running
    requests are given to finish once the server is asked to stop. `warm_up`: compile everything before the first
    request is taken. `max_message_bytes`: of one request (over gRPC, of one response too). `tls_cert_file` and
    `tls_key_file`: PEM, both or none. `api_key`, or what `api_key_file` holds: the bearer token that clients must send.
    `served_model_name`: what clients call the model; None is its checkpoint's name. `cors_origins`: web pages that may
    use the HTTP server, such as "https://example.org", or "*". `log_requests`: a line for each request that ends.
    """

    host: str = "127.0.0.1"
    grpc_port: int | None = 9000
    http_port: int | None = 8000
    drain_seconds: float = 30.0
    warm_up: bool = True
    max_message_bytes: int = 4 * 2**20
    tls_cert_file: Path | None = None
    tls_key_file: Path | None = None
    api_key: str | None = dataclasses.field(default=None, repr=False)
    api_key_file: Path | None = None
    served_model_name: str | None = None
    cors_origins: tuple[str, ...] = ()
    log_format: LogFormat = LogFormat.TEXT
    log_requests: bool = True

    def __post_init__(self) -> None:
        for name, port in (("grpc_port", self.grpc_port), ("http_port", self.http_port)):
            if port is not None and not 0 <= port < 2**16:
                raise ValueError(f"{name} is {port}; expected 0 to {2**16 - 1}")
        if self.grpc_port is None and self.http_port is None:
            raise ValueError("grpc_port and http_port are both off; expected at least one")
        if self.api_key is not None and self.api_key_file is not None:
            raise ValueError("api_key and api_key_file are both set; expected one at most")
        if self.served_model_name == "":
            raise ValueError("served_model_name is empty; expected a name, or none")
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"cors_origins has {origin!r}; expected origins as browsers tell them, like https://example.org or"
                    " http://localhost:3000 (no path, lower case), or * for all"
                )
        if not 0 <= self.drain_seconds < math.inf:
            raise ValueError(f"drain_seconds is {self.drain_seconds}; expected a finite number, 0 or more")
        check_positive("max_message_bytes", self.max_message_bytes)
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_cert_file and tls_key_file belong together; expected both or none")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvertConfig:
    """What `convert_checkpoints.py` reads and writes, and how it rounds.

    `source.checkpoint_path` is the input. `output` None writes nothing, and shows what would be made. `output_format`:
    one of `EXPORT_FORMATS`; None is jetserve's own.
    """

    source: ModelSource
    output: Path | None
    output_format: str | None = None
    method: MethodConfig | AutoConfig = ROUND_TO_NEAREST

    def __post_init__(self) -> None:
        if self.output_format not in (None, *EXPORT_FORMATS):
            raise ValueError(f"output_format is {self.output_format!r}; expected one of {', '.join(EXPORT_FORMATS)}")
