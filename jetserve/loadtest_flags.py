"""The command line of `python -m jetserve.loadtest`, in `flags`' way."""

from absl import flags

from jetserve.flags import FLAGS, define, path_of
from jetserve.loadtest.config import Goals, LoadTestConfig, Server
from jetserve.loadtest.workload import Lengths
from jetserve.types import SamplingParams


def define_loadtest() -> None:
    """Where the load goes, what it is, and what is reported."""
    define(
        flags.DEFINE_string,
        "url",
        "grpc://127.0.0.1:9000",
        "grpc://HOST:PORT for JetStream's protocol, http://HOST:PORT for OpenAI's; grpcs and https for TLS.",
    )
    define(flags.DEFINE_string, "model", None, "The name that OpenAI's API wants (unset: the server's first).")
    define(flags.DEFINE_string, "api_key_file", None, "A file that holds the key to send as bearer token.")
    define(flags.DEFINE_string, "tls_ca_file", None, "PEM certificates to trust (unset: the system's).")
    define(flags.DEFINE_float, "request_rate", None, "Requests a second, on average: arrivals of a Poisson process.")
    define(flags.DEFINE_integer, "concurrency", None, "Requests under way, the next as one ends.", lower_bound=1)
    define(
        flags.DEFINE_integer,
        "num_requests",
        None,
        "How many (unset: until --duration is over; else every prompt of the file once, or 100).",
        lower_bound=1,
    )
    define(flags.DEFINE_float, "duration", None, "Seconds in which requests start; those under way are waited for.")
    define(flags.DEFINE_string, "prompts_file", None, "A JSON object a line, as for run_offline.py --task=generate.")
    lengths = "128, uniform:LOW,HIGH or lognormal:MEDIAN,SIGMA,HIGHEST."
    define(flags.DEFINE_string, "input_tokens", None, f"Of random prompts (unset: 128): {lengths}")
    define(
        flags.DEFINE_string,
        "output_tokens",
        None,
        f"Exactly, of every answer (unset: 128, or what the file says): {lengths}",
    )
    define(flags.DEFINE_float, "temperature", 0.0, "Where a prompt does not say otherwise.")
    define(flags.DEFINE_integer, "seed", 0, "Of prompts, lengths and arrivals.")
    define(flags.DEFINE_integer, "warmup_requests", 0, "Sent before, and not counted.", lower_bound=0)
    define(flags.DEFINE_float, "timeout_seconds", 600.0, "After which a request has failed.")
    define(flags.DEFINE_float, "goal_ttft_ms", None, "For the goodput: time to first token, at most.")
    define(flags.DEFINE_float, "goal_tpot_ms", None, "For the goodput: time per output token, at most.")
    define(flags.DEFINE_float, "goal_latency_ms", None, "For the goodput: time to the last token, at most.")
    define(flags.DEFINE_string, "plot", None, "A PNG file to write; takes matplotlib.")
    define(flags.DEFINE_string, "output_file", None, "To write: a JSON object a request.")


def loadtest_config() -> LoadTestConfig:
    """From `define_loadtest`."""
    token_file = path_of(FLAGS.api_key_file)
    server = Server(
        url=FLAGS.url,
        token=None if token_file is None else token_file.read_text(encoding="utf-8").strip(),
        tls_ca_file=path_of(FLAGS.tls_ca_file),
        model=FLAGS.model,
    )
    return LoadTestConfig(
        server=server,
        request_rate=FLAGS.request_rate,
        concurrency=FLAGS.concurrency,
        num_requests=FLAGS.num_requests,
        duration=FLAGS.duration,
        prompts_file=path_of(FLAGS.prompts_file),
        input_tokens=_lengths("input_tokens"),
        output_tokens=_lengths("output_tokens"),
        sampling=SamplingParams(temperature=FLAGS.temperature),
        seed=FLAGS.seed,
        warmup_requests=FLAGS.warmup_requests,
        timeout_seconds=FLAGS.timeout_seconds,
        goals=Goals(ttft_ms=FLAGS.goal_ttft_ms, tpot_ms=FLAGS.goal_tpot_ms, latency_ms=FLAGS.goal_latency_ms),
        plot=path_of(FLAGS.plot),
        output_file=path_of(FLAGS.output_file),
    )


def _lengths(flag: str) -> Lengths | None:
    value: str | None = FLAGS[flag].value
    if value is None:
        return None
    try:
        return Lengths.parse(value)
    except ValueError as error:
        raise ValueError(f"--{flag}: {error}") from error
