"""Makes a plan: compiles the real steps of the real model for chips that are not there, and says what they take."""

import dataclasses
import json
import logging
import sys
import time
from typing import Any

from jetserve.parallel.mesh import make_mesh
from jetserve.plan import report
from jetserve.plan.advice import Advice, advise, largest
from jetserve.plan.chips import Topology, find_topology
from jetserve.plan.compile import Program, TooBig, compile_layers, compile_step
from jetserve.plan.config import Comparison, PlanConfig
from jetserve.plan.estimate import roofline
from jetserve.plan.subject import Placed, Subject

logger = logging.getLogger(__name__)

MILLION = 10**6
SECONDS_AN_HOUR = 3600


def run(comparison: Comparison) -> int:
    """Makes the plans, shows them on standard error, and writes JSON as the last line of standard output.

    Returns:
      The exit code: 0 if a plan fits.

    Raises:
      ValueError: for what cannot be planned, before anything is compiled.
    """
    report.check_plot(comparison.plot)
    prepared = [prepare(config) for config in comparison.plans]
    results = []
    for config, (topology, placed) in zip(comparison.plans, prepared, strict=True):
        result, advice = make_plan(config, topology, placed)
        results.append(result)
        report.show(result, advice, placed.explain() if config.explain else None)
    if len(results) > 1:
        report.show_comparison(results)
    if comparison.plot is not None:
        report.plot(results, comparison.plot)
    print(json.dumps(results[0] if len(results) == 1 else {"plans": results}), file=sys.stdout)
    return 0 if any(result["fits"] for result in results) else 1


def prepare(config: PlanConfig) -> tuple[Topology, Placed]:
    """A plan's devices, and its model over them, in shapes. Raises as `Subject.of` and `find_topology` do."""
    subject = Subject.of(config)
    limit = subject.config.max_position
    if config.engine.max_length > limit:
        raise ValueError(
            f"--max_cache_length is {config.engine.max_length}, but the model was made for up to {limit} tokens"
        )
    topology = find_topology(config.topology)
    return topology, subject.over(make_mesh(config.engine.mesh, topology.devices), config.engine)


def make_plan(config: PlanConfig, topology: Topology, placed: Placed) -> tuple[dict[str, Any], Advice | None]:
    """Compiles a plan's steps.

    Returns:
      What JSON says of it, and for a plan that does not fit what would.
    """
    engine, limit = config.engine, topology.chip.hbm_bytes
    make = compile_step if config.all_layers else compile_layers
    start = time.monotonic()
    programs: list[Program] = []
    needed = placed.weights_bytes + placed.cache_bytes
    if needed <= limit:
        for tokens, is_decode in ((engine.max_sequences, True), (engine.max_step_tokens, False)):
            logger.info("compiling a step of %d tokens of %s for %s", tokens, placed.subject.name, topology.name)
            program = make(placed, tokens=tokens, sequences=engine.max_sequences, decode=is_decode)
            if isinstance(program, TooBig):
                needed = max(needed, program.needed_bytes)
            else:
                needed = max(needed, program.total_bytes)
                programs.append(program)
    temp = max((program.temp_bytes for program in programs), default=None)
    result = _described(config, topology, placed) | {
        "fits": needed <= limit,
        "temp_bytes_per_device": temp,
        "needed_bytes_per_device": needed,
        "argument_bytes_per_device": programs[0].argument_bytes if programs else None,
        "collectives": dict(programs[0].collectives) if programs else None,
        "compile_seconds": round(time.monotonic() - start, 1),
        **largest(placed, limit, temp),
    }
    for program in programs:
        speed = _decode_speed if program.tokens == engine.max_sequences else _prefill_speed
        result |= speed(config, topology, placed, program)
    too_big = TooBig(needed_bytes=needed, limit_bytes=limit)
    return result, None if result["fits"] else advise(config, topology, placed, too_big)


def _described(config: PlanConfig, topology: Topology, placed: Placed) -> dict[str, Any]:
    return {
        "model": placed.subject.name,
        "quantize_type": placed.subject.quantize_type,
        "quantize_kv_cache": config.engine.cache.quantize,
        "topology": topology.name,
        "chips": topology.num_chips,
        "devices": len(topology.devices),
        "batch_size": config.engine.max_sequences,
        "max_cache_length": config.engine.max_length,
        "hbm_bytes_per_device": topology.chip.hbm_bytes,
        "weights_bytes_per_device": placed.weights_bytes,
        "ideal_weights_bytes_per_device": placed.ideal_weights_bytes,
        "kv_cache_bytes_per_device": placed.cache_bytes,
    }


def _decode_speed(config: PlanConfig, topology: Topology, placed: Placed, program: Program) -> dict[str, Any]:
    bound = roofline(
        placed,
        topology.chip,
        tokens=program.tokens,
        sequences=program.sequences,
        kv_length=config.engine.max_length,
        collective_bytes=program.collective_bytes,
    )
    tokens_per_second = program.tokens / bound.seconds
    result: dict[str, Any] = {
        "roofline_step_ms": 1e3 * bound.seconds,
        "roofline_ms": {name: 1e3 * value for name, value in dataclasses.asdict(bound).items()},
        "estimated_step_ms": _milliseconds(program, topology),
        "tokens_per_second": tokens_per_second,
        "dollars_per_million_tokens": None,
    }
    if config.dollars_per_chip_hour is not None:
        a_second = config.dollars_per_chip_hour * topology.num_chips / SECONDS_AN_HOUR
        result["dollars_per_million_tokens"] = a_second / tokens_per_second * MILLION
    return result


def _prefill_speed(config: PlanConfig, topology: Topology, placed: Placed, program: Program) -> dict[str, Any]:
    bound = roofline(
        placed,
        topology.chip,
        tokens=program.tokens,
        sequences=1,
        kv_length=program.tokens,
        collective_bytes=program.collective_bytes,
    )
    return {
        "prefill_tokens": program.tokens,
        "prefill_roofline_step_ms": 1e3 * bound.seconds,
        "prefill_estimated_step_ms": _milliseconds(program, topology),
        "prefill_tokens_per_second": program.tokens / bound.seconds,
    }


def _milliseconds(program: Program, topology: Topology) -> float:
    """That the compiler expects a program to take."""
    chip = topology.chip
    return 1e3 * (program.cycles / chip.hertz + program.kernel_bytes / chip.hbm_bytes_per_second)
