"""The command line: groups of flags, and the frozen configurations made from them.

The only importer of absl.flags, but for the scripts. Every flag that a command accepts takes effect or is refused.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from jetserve.config import (
    CPU_ACTIVATIONS,
    CacheConfig,
    EngineConfig,
    InteractiveConfig,
    LogFormat,
    MeshConfig,
    ModelSource,
    OfflineConfig,
    SamplingDefaults,
    ServerConfig,
)
from jetserve.default_model import default_cache_dir

FLAGS = flags.FLAGS

QUANTIZE_TYPES = ("int8_per_channel", "int4_per_channel", "int8_blockwise", "int4_blockwise", "none", "keep")
DEFAULT_STEP_TOKENS = 512
NO_PORT = -1
TASKS = ("generate", "perplexity", "benchmark")


def define(definer: object, name: str, *args: object, **kwargs: object) -> None:
    """Defines a flag and lists it in the command's own --help."""
    definer(name, *args, **kwargs)  # type: ignore[operator]
    FLAGS.register_key_flag_for_module(sys.argv[0], FLAGS[name])


def define_quantization() -> None:
    """How weights are quantized."""
    define(
        flags.DEFINE_bool,
        "quantize_weights",
        None,
        "True wants a --quantize_type (int8_per_channel unless set); False refuses one.",
    )
    define(flags.DEFINE_alias, "quantize", "quantize_weights")
    define(
        flags.DEFINE_enum,
        "quantize_type",
        None,
        QUANTIZE_TYPES,
        "What weights become. none: floats. keep: the source's own quantization, carried over exactly. Unset: keep for"
        " a quantized source, none for a float one, and what a converted checkpoint is.",
    )
    define(
        flags.DEFINE_integer,
        "block_size",
        None,
        "Weights that share a scale, for blockwise types: a multiple of 32 (128 unless set; the largest multiple of 32"
        " that divides a weight's input size where 128 does not).",
    )
    define(
        flags.DEFINE_bool,
        "symmetric",
        None,
        "Whether quantized weights have no zero point (unset: they have none). --symmetric=False is more accurate and"
        " a little larger.",
    )
    define(
        flags.DEFINE_string,
        "quantize_recipe",
        None,
        "A JSON or YAML file that says by patterns of tensor names what weights become; the other flags are for those"
        " that it leaves.",
    )


def define_model() -> None:
    """Which model is run, and how."""
    define(
        flags.DEFINE_string,
        "checkpoint_path",
        None,
        "A converted checkpoint, a Hugging Face folder, a GGUF file or a hub id (owner/name). Unset: the default model,"
        " SmolLM2-135M-Instruct, fetched once.",
    )
    define(
        flags.DEFINE_string,
        "model_name",
        None,
        "A published model, such as llama-2, with --size: its shapes with random weights, for benchmarks. With a"
        " checkpoint, what that must be.",
    )
    define(flags.DEFINE_string, "size", None, "Of --model_name, such as 7b.")
    define(flags.DEFINE_string, "tokenizer_path", None, "A tokenizer's folder, in place of the checkpoint's own.")
    define_quantization()
    define(
        flags.DEFINE_bool,
        "quantize_activation",
        False,
        "Quantize activations to int8, per token, in matmuls with quantized weights (W8A8, W4A8).",
    )
    define(
        flags.DEFINE_enum,
        "cpu_activation",
        "int8",
        CPU_ACTIVATIONS,
        "What the CPU kernels make of activations that meet quantized weights. int8: fast, a scale for every 32 of them"
        " (int16 where weights have 8 bits). float32: exact; one stream decodes at two thirds of the speed, prompts are"
        " read at a bit more than a third.",
    )
    define_cache_dir("Where fetched models, compiled programs and the CPU kernels are kept")


def define_engine() -> None:
    """The engine's limits."""
    define(
        flags.DEFINE_integer,
        "max_cache_length",
        None,
        "Tokens that a sequence may have, prompt and answer (unset: what the model was made for, up to 2048).",
        lower_bound=2,
    )
    define(
        flags.DEFINE_integer,
        "max_step_tokens",
        None,
        f"Tokens a step computes at most; longer prompts are chunked (unset: {DEFAULT_STEP_TOKENS}).",
        lower_bound=1,
    )
    define(flags.DEFINE_integer, "page_size", 16, "Tokens a page of the KV cache holds.", lower_bound=1)
    define(flags.DEFINE_bool, "quantize_kv_cache", False, "Keep keys and values in int8, a scale a token and head.")
    define(flags.DEFINE_bool, "prefix_caching", True, "Share the cache's pages between prompts that begin alike.")
    define(
        flags.DEFINE_enum,
        "dtype",
        None,
        ("float32", "bfloat16"),
        "Of activations, and of weights that are not quantized (unset: float32 on CPU, bfloat16 elsewhere).",
    )
    define(
        flags.DEFINE_integer, "tensor_parallelism", None, "Devices that share each layer (unset: all).", lower_bound=1
    )


def define_batch() -> None:
    """How many sequences run at once, for all commands but the chat, which runs one."""
    define(flags.DEFINE_integer, "batch_size", 8, "Sequences that run at once.", lower_bound=1)
    define(
        flags.DEFINE_integer,
        "num_pages",
        None,
        "Pages of the KV cache (unset: enough for --batch_size sequences of full length).",
        lower_bound=1,
    )


def define_sampling() -> None:
    """Sampling where a prompt does not say otherwise."""
    define(
        flags.DEFINE_integer,
        "max_tokens",
        None,
        "Tokens an answer may have (unset: 256 offline, all that fit in a chat); for --task=perplexity, how many tokens"
        " of the text are read (unset: all).",
        lower_bound=1,
    )
    define(flags.DEFINE_float, "temperature", 0.0, "0 picks the likeliest token; higher is more random.")
    define(flags.DEFINE_integer, "top_k", 0, "Sample among the k likeliest tokens (0: all).")
    define(flags.DEFINE_float, "top_p", 1.0, "Sample among the likeliest tokens that have this probability together.")
    define(flags.DEFINE_float, "min_p", 0.0, "Sample among tokens with this share of the likeliest one's probability.")
    define(flags.DEFINE_integer, "seed", None, "Of sampling; unset draws one for every answer.")


def define_offline() -> None:
    """What run_offline.py does."""
    define(flags.DEFINE_enum, "task", "generate", TASKS, "What to do.")
    define(
        flags.DEFINE_string,
        "prompts_file",
        None,
        'generate: a JSON object a line, {"prompt": …} or {"messages": […]} with any sampling field.',
    )
    define(flags.DEFINE_string, "output_file", None, "generate: a JSON object a line, in order; resumed if it exists.")
    define(flags.DEFINE_string, "text_file", None, "perplexity: the text to evaluate, UTF-8.")
    define(flags.DEFINE_integer, "window", 1024, "perplexity: tokens a window; windows do not overlap.", lower_bound=2)
    define(
        flags.DEFINE_string,
        "reference_checkpoint",
        None,
        "perplexity: a checkpoint to compare with, in floating point: KL divergence and top-1 agreement.",
    )
    define(flags.DEFINE_integer, "input_tokens", 512, "benchmark: tokens of every prompt.", lower_bound=1)
    define(flags.DEFINE_integer, "output_tokens", 128, "benchmark: tokens of every answer.", lower_bound=2)


def define_interactive() -> None:
    """What run_interactive.py starts with."""
    define(flags.DEFINE_string, "system", None, "The system message (unset: the chat template's own).")


def define_server() -> None:
    """Where and how run_server.py serves."""
    define(flags.DEFINE_string, "host", "127.0.0.1", "Address to listen on. 0.0.0.0 is every one of this machine.")
    for protocol, port in (("grpc", 9000), ("http", 8000)):
        text = f"Of {protocol}; 0 lets the system choose one, {NO_PORT} serves nothing there."
        define(flags.DEFINE_integer, f"{protocol}_port", port, text, NO_PORT, 65535)
    define(
        flags.DEFINE_integer,
        "max_queue",
        1024,
        "Sequences that wait; requests that would make it more are refused.",
        lower_bound=1,
    )
    define(
        flags.DEFINE_float,
        "drain_seconds",
        30.0,
        "What running requests have to finish after SIGTERM; a second one ends them.",
        lower_bound=0.0,
    )
    define(flags.DEFINE_bool, "warmup", True, "Compile everything before the first request is taken.")
    define(flags.DEFINE_integer, "max_message_bytes", 4 * 2**20, "Of one request.", lower_bound=1)
    define(flags.DEFINE_string, "tls_cert_file", None, "A PEM certificate chain; turns TLS on, with --tls_key_file.")
    define(flags.DEFINE_string, "tls_key_file", None, "The PEM key of --tls_cert_file.")
    define(
        flags.DEFINE_string,
        "api_key",
        None,
        "What clients must send as bearer token. Other users of this machine can see it: prefer --api_key_file.",
    )
    define(flags.DEFINE_string, "api_key_file", None, "A file that holds the --api_key.")
    define(flags.DEFINE_alias, "auth_token_file", "api_key_file")
    define(flags.DEFINE_string, "served_model_name", None, "What clients call the model (unset: its own name).")
    define(
        flags.DEFINE_list,
        "cors_origins",
        [],
        'Web pages that may use the HTTP server, as "https://example.org", separated by commas; * is all.',
    )
    define(
        flags.DEFINE_enum,
        "log_format",
        LogFormat.TEXT.value,
        [form.value for form in LogFormat],
        "text: for people. json: an object a line.",
    )
    define(flags.DEFINE_bool, "log_requests", True, "Log a line for each request that ends; never its text.")


def refuse_arguments(argv: Sequence[str]) -> None:
    """Words that are not flags have no meaning here.

    Raises:
      ValueError: if there are any.
    """
    if len(argv) > 1:
        raise ValueError(f"found {' '.join(argv[1:])!r} on the command line; expected flags, such as --name=value")


def quantize_type() -> str | None:
    """--quantize_type, and --quantize_weights where it says more."""
    found = FLAGS.quantize_type
    if FLAGS.quantize_weights is False and FLAGS.quantize_recipe is not None:
        raise ValueError("--quantize_weights=False contradicts --quantize_recipe; drop one of the two")
    if FLAGS.quantize_weights is False:
        if found not in (None, "none"):
            raise ValueError(f"--quantize_weights=False contradicts --quantize_type={found}; drop one of the two")
        return "none"
    if FLAGS.quantize_weights and found == "none":
        raise ValueError("--quantize_weights=True contradicts --quantize_type=none; drop one of the two")
    return found or ("int8_per_channel" if FLAGS.quantize_weights else None)


def model_source() -> ModelSource:
    """From `define_model`."""
    return ModelSource(
        checkpoint_path=FLAGS.checkpoint_path,
        model_name=FLAGS.model_name,
        size=FLAGS.size,
        tokenizer_path=FLAGS.tokenizer_path,
        quantize_type=quantize_type(),
        block_size=FLAGS.block_size,
        symmetric=FLAGS.symmetric,
        quantize_recipe=path_of(FLAGS.quantize_recipe),
        quantize_activation=FLAGS.quantize_activation,
        cpu_activation=FLAGS.cpu_activation,
        cache_dir=cache_dir(),
    )


def engine_config(*, platform: str) -> EngineConfig:
    """From `define_engine` and, where it was, `define_batch`, for a jax platform ("cpu", "tpu", …)."""
    if platform != "cpu" and FLAGS["cpu_activation"].present:
        raise ValueError(f"--cpu_activation is for CPUs, but this is {platform}; drop it (see --quantize_activation)")
    has_batch = "batch_size" in FLAGS
    batch_size = FLAGS.batch_size if has_batch else 1
    return EngineConfig(
        max_sequences=batch_size,
        max_step_tokens=FLAGS.max_step_tokens or max(DEFAULT_STEP_TOKENS, batch_size),
        max_queue=FLAGS.max_queue if "max_queue" in FLAGS else EngineConfig.max_queue,
        dtype=FLAGS.dtype or ("float32" if platform == "cpu" else "bfloat16"),
        cache=CacheConfig(
            page_size=FLAGS.page_size,
            num_pages=FLAGS.num_pages if has_batch else None,
            quantize=FLAGS.quantize_kv_cache,
            prefix_caching=FLAGS.prefix_caching,
        ),
        mesh=MeshConfig(tensor=FLAGS.tensor_parallelism),
    )


def max_length() -> int | None:
    """From `define_engine`: tokens a sequence may have, or None for the model's."""
    return FLAGS.max_cache_length


def sampling_defaults() -> SamplingDefaults:
    """From `define_sampling`."""
    return SamplingDefaults(
        max_tokens=FLAGS.max_tokens,
        temperature=FLAGS.temperature,
        top_k=FLAGS.top_k,
        top_p=FLAGS.top_p,
        min_p=FLAGS.min_p,
        seed=FLAGS.seed,
    )


def define_cache_dir(what: str) -> None:
    """Where things are kept."""
    define(flags.DEFINE_string, "cache_dir", None, f"{what} (unset: jetserve in XDG_CACHE_HOME, or in ~/.cache).")


def cache_dir() -> Path:
    """From `define_cache_dir`. Raises NoHomeError as `default_cache_dir` does."""
    return path_of(FLAGS.cache_dir) or default_cache_dir()


def path_of(value: str | None) -> Path | None:
    """A flag that names a file."""
    return None if value is None else Path(value).expanduser()


def _port(value: int) -> int | None:
    return None if value == NO_PORT else value


def _refuse_flags_of_other_tasks() -> None:
    """A flag that another task reads would have no effect on this one."""
    belongs = {
        "prompts_file": "generate",
        "output_file": "generate",
        "text_file": "perplexity",
        "window": "perplexity",
        "reference_checkpoint": "perplexity",
        "input_tokens": "benchmark",
        "output_tokens": "benchmark",
    }
    for name, task in belongs.items():
        if FLAGS[name].present and task != FLAGS.task:
            raise ValueError(f"--{name} belongs to --task={task}, but the task is {FLAGS.task}; drop one of the two")
    sampling = ("temperature", "top_k", "top_p", "min_p", "seed")
    for name in () if FLAGS.task == "generate" else sampling:
        if FLAGS[name].present:
            raise ValueError(f"--{name} has no effect on --task={FLAGS.task}; drop it")
    if FLAGS.task == "benchmark" and FLAGS.max_tokens is not None:
        raise ValueError("--max_tokens has no effect on --task=benchmark; set --output_tokens")


def offline_config() -> OfflineConfig:
    """From `define_offline` and `define_sampling`."""
    _refuse_flags_of_other_tasks()
    return OfflineConfig(
        task=FLAGS.task,
        prompts_file=path_of(FLAGS.prompts_file),
        output_file=path_of(FLAGS.output_file),
        text_file=path_of(FLAGS.text_file),
        window=FLAGS.window,
        reference_checkpoint=FLAGS.reference_checkpoint,
        input_tokens=FLAGS.input_tokens,
        output_tokens=FLAGS.output_tokens,
        sampling=sampling_defaults(),
    )


def interactive_config() -> InteractiveConfig:
    """From `define_interactive` and `define_sampling`."""
    return InteractiveConfig(system=FLAGS.system, sampling=sampling_defaults())


def server_config() -> ServerConfig:
    """From `define_server`."""
    return ServerConfig(
        host=FLAGS.host,
        grpc_port=_port(FLAGS.grpc_port),
        http_port=_port(FLAGS.http_port),
        drain_seconds=FLAGS.drain_seconds,
        warm_up=FLAGS.warmup,
        max_message_bytes=FLAGS.max_message_bytes,
        tls_cert_file=path_of(FLAGS.tls_cert_file),
        tls_key_file=path_of(FLAGS.tls_key_file),
        api_key=FLAGS.api_key,
        api_key_file=path_of(FLAGS.api_key_file),
        served_model_name=FLAGS.served_model_name,
        cors_origins=tuple(FLAGS.cors_origins),
        log_format=LogFormat(FLAGS.log_format),
        log_requests=FLAGS.log_requests,
    )
