"""The commands: parse flags, build a configuration, call one function.

What `convert_checkpoints.py`, `run_server.py`, `run_interactive.py`, `run_offline.py` and `python -m jetserve` run. An
error that a user can mend ends a command with its message and exit code 1, without a traceback (--debug shows it).
"""

import logging
import os
import sys
from collections.abc import Callable, Sequence

from absl import app
from absl import flags as absl_flags
from absl import logging as absl_logging

from jetserve import convert_flags, evaluate_flags, flags, loadtest_flags, plan_flags, processes_flags

FLAGS = absl_flags.FLAGS
_DEBUG = absl_flags.DEFINE_bool("debug", False, "Show tracebacks and debug logs.")


def _run(description: str, groups: Sequence[Callable[[], None]], command: Callable[[], int]) -> None:
    """Defines the flags of `groups`, parses the command line, runs `command` and exits with its code."""
    for group in groups:
        group()
    sys.modules["__main__"].__doc__ = description

    def main(argv: Sequence[str]) -> int:
        logging.basicConfig(stream=sys.stderr, format="%(message)s", force=True)
        logging.getLogger("jetserve").setLevel(logging.DEBUG if _DEBUG.value else logging.INFO)
        # Orbax logs a page for every part that it writes, through absl's logger.
        absl_logging.set_verbosity(absl_logging.DEBUG if _DEBUG.value else absl_logging.WARNING)
        # JAX warns of every kind of device that it looks for and does not find, a TPU on a laptop for one.
        logging.getLogger("jax._src.xla_bridge").setLevel(logging.DEBUG if _DEBUG.value else logging.ERROR)
        try:
            flags.refuse_arguments(argv)
            return command()
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr)
            return 130
        except (ValueError, OSError, RuntimeError, NotImplementedError) as error:
            if _DEBUG.value:
                raise
            print(f"error: {error}", file=sys.stderr)
            return 1

    FLAGS.register_key_flag_for_module(sys.argv[0], FLAGS["debug"])
    asked_for_help = any(argument in ("--help", "-h", "-help", "--helpfull", "--helpshort") for argument in sys.argv)
    try:
        app.run(main)
    except SystemExit as end:
        # absl calls it a failure to have been asked for help.
        raise SystemExit(0 if asked_for_help and end.code == 1 else end.code) from None


def convert_command() -> None:
    """Quantizes a checkpoint."""

    def command() -> int:
        config = convert_flags.convert_config()
        from jetserve import convert

        return convert.run(config)

    _run("Converts a checkpoint, quantizing its weights.", [convert_flags.define_convert], command)


def serve_command() -> None:
    """Serves a model over gRPC and HTTP."""

    def command() -> int:
        source, config, max_length = flags.model_source(), flags.server_config(), flags.max_length()
        processes_config = processes_flags.processes_config()
        import jax

        from jetserve.parallel import processes
        from jetserve.server import follow, serve

        if processes_config is not None:
            processes.initialize(processes_config)
        engine_config = flags.engine_config(platform=jax.default_backend())
        if processes_config is not None and processes_config.process_id > 0:
            return follow.run(processes_config, source, engine_config, max_length=max_length)
        return serve.run(config, source, engine_config, max_length=max_length, processes_config=processes_config)

    groups = [flags.define_server, processes_flags.define_processes]
    groups += [flags.define_model, flags.define_batch, flags.define_engine]
    try:
        _run("Serves a model over JetStream's gRPC protocol and OpenAI's HTTP API.", groups, command)
    except SystemExit as end:
        # All are answered and all is written. The interpreter would go on for seconds, only to free memory; or for
        # minutes, for other processes to end theirs.
        logging.shutdown()
        sys.stdout.flush()
        os._exit(end.code if isinstance(end.code, int) else 0)


def chat_command() -> None:
    """Chats in the terminal."""

    def command() -> int:
        source, config, max_length = flags.model_source(), flags.interactive_config(), flags.max_length()
        import jax

        from jetserve import interactive

        engine_config = flags.engine_config(platform=jax.default_backend())
        return interactive.run(config, source, engine_config, max_length=max_length)

    groups = [flags.define_model, flags.define_interactive, flags.define_sampling, flags.define_engine]
    _run("Chats with a model in the terminal.", groups, command)


def offline_command() -> None:
    """Generates from a file of prompts, evaluates, benchmarks."""

    def command() -> int:
        source, config, max_length = flags.model_source(), flags.offline_config(), flags.max_length()
        import jax

        from jetserve import offline

        engine_config = flags.engine_config(platform=jax.default_backend())
        return offline.run(config, source, engine_config, max_length=max_length)

    groups = [flags.define_offline, flags.define_model, flags.define_sampling, flags.define_batch, flags.define_engine]
    _run("Generates from files of prompts, evaluates perplexity, benchmarks.", groups, command)


def evaluate_command() -> None:
    """Compares models: perplexity, divergence, lm-eval's tasks."""

    def command() -> int:
        config, sources, max_length = (
            evaluate_flags.evaluate_config(),
            evaluate_flags.evaluate_sources(),
            flags.max_length(),
        )
        import jax

        from jetserve.evaluate import compare

        engine_config = flags.engine_config(platform=jax.default_backend())
        return compare.run(config, sources, engine_config, max_length=max_length)

    groups = [evaluate_flags.define_evaluate, flags.define_model, flags.define_batch, flags.define_engine]
    _run("Compares models by perplexity, divergence and lm-eval's tasks.", groups, command)


def loadtest_command() -> None:
    """Loads a server, over gRPC or HTTP, and measures what its clients see."""

    def command() -> int:
        config = loadtest_flags.loadtest_config()
        from jetserve import loadtest

        return loadtest.run(config)

    _run("Loads a server and measures what its clients see.", [loadtest_flags.define_loadtest], command)


def plan_command() -> None:
    """Says whether a model fits on TPUs, and how fast it can be there, without one."""

    def command() -> int:
        comparison = plan_flags.comparison()
        # libtpu only compiles here: it need not look for TPUs, nor keep other processes from them.
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
        import jax

        jax.config.update("jax_platforms", "cpu")
        from jetserve.plan import run

        return run.run(comparison)

    _run("Says whether a model fits on TPUs, and how fast it can be there.", [plan_flags.define_plan], command)
