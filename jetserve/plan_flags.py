"""The command line of `python -m jetserve.plan`, in `flags`' way."""

import dataclasses
from collections.abc import Sequence

from absl import flags

from jetserve.config import CacheConfig, EngineConfig, MeshConfig
from jetserve.flags import (
    DEFAULT_STEP_TOKENS,
    FLAGS,
    QUANTIZE_TYPES,
    define,
    define_quantization,
    path_of,
    quantize_type,
)
from jetserve.plan.config import Comparison, PlanConfig


def define_plan() -> None:
    """What is planned, for which chips, and what is told of it."""
    define(flags.DEFINE_string, "model_name", None, "A preset's family, such as llama-2, with --size; or")
    define(flags.DEFINE_string, "size", None, "Of the preset, such as 7b.")
    define(
        flags.DEFINE_string,
        "checkpoint_path",
        None,
        "A checkpoint of any format, or a hub id: what it says of itself is read, and not its weights.",
    )
    define_quantization()
    define(flags.DEFINE_bool, "quantize_activation", False, "Int8 activations in matmuls with quantized weights.")
    define(flags.DEFINE_string, "topology", "v5e:2x4", "Chips: v5e, v6e, v5p or tpu7x, and a size that libtpu knows.")
    define(flags.DEFINE_integer, "batch_size", 8, "Sequences that run at once.", lower_bound=1)
    define(flags.DEFINE_integer, "max_cache_length", 2048, "Tokens that each may have.", lower_bound=2)
    define(flags.DEFINE_integer, "max_step_tokens", None, "Tokens of a prefill step (unset: 512).", lower_bound=1)
    define(flags.DEFINE_integer, "page_size", 16, "Tokens a page of the KV cache holds.", lower_bound=1)
    define(flags.DEFINE_bool, "quantize_kv_cache", False, "Keys and values in int8, a scale a token and head.")
    define(flags.DEFINE_enum, "dtype", "bfloat16", ("float32", "bfloat16"), "Of activations and float weights.")
    define(flags.DEFINE_integer, "tensor_parallelism", None, "Devices that share each layer.", lower_bound=1)
    define(flags.DEFINE_float, "price_per_hour", None, "Dollars that one chip costs, for the price of tokens.")
    define(flags.DEFINE_bool, "explain", False, "Tell how every weight is split over the devices, and why.")
    define(
        flags.DEFINE_bool,
        "all_layers",
        False,
        "Compile the whole model, which takes minutes; else programs of one and two layers tell what all of them take.",
    )
    define(
        flags.DEFINE_list,
        "compare",
        [],
        "Plans side by side: quantize types, or topologies, separated by commas, in place of the one flag.",
    )
    define(flags.DEFINE_string, "plot", None, "A PNG of the comparison to write; takes matplotlib.")


def comparison() -> Comparison:
    """From `define_plan`.

    Raises:
      ValueError: for flags that contradict each other.
    """
    batch_size = FLAGS.batch_size
    plan = PlanConfig(
        model_name=FLAGS.model_name,
        size=FLAGS.size,
        checkpoint_path=FLAGS.checkpoint_path,
        topology=FLAGS.topology,
        quantize_type=quantize_type(),
        block_size=FLAGS.block_size,
        symmetric=FLAGS.symmetric,
        quantize_activation=FLAGS.quantize_activation,
        engine=EngineConfig(
            max_sequences=batch_size,
            max_length=FLAGS.max_cache_length,
            max_step_tokens=FLAGS.max_step_tokens or max(DEFAULT_STEP_TOKENS, batch_size),
            dtype=FLAGS.dtype,
            cache=CacheConfig(page_size=FLAGS.page_size, quantize=FLAGS.quantize_kv_cache),
            mesh=MeshConfig(tensor=FLAGS.tensor_parallelism),
        ),
        dollars_per_chip_hour=FLAGS.price_per_hour,
        explain=FLAGS.explain,
        all_layers=FLAGS.all_layers,
    )
    return Comparison(plans=_side_by_side(plan, FLAGS.compare), plot=path_of(FLAGS.plot))


def _side_by_side(plan: PlanConfig, names: Sequence[str]) -> tuple[PlanConfig, ...]:
    if not names:
        if FLAGS.plot is not None:
            raise ValueError("--plot shows a comparison; set --compare too, or drop it")
        return (plan,)
    if all(":" in name for name in names):
        _refuse("topology")
        return tuple(dataclasses.replace(plan, topology=name) for name in names)
    unknown = [name for name in names if name not in QUANTIZE_TYPES]
    if unknown:
        raise ValueError(
            f"--compare has {unknown[0]!r}; expected quantize types ({', '.join(QUANTIZE_TYPES)}) or topologies such as"
            " v5e:2x4, and not both"
        )
    _refuse("quantize_type")
    return tuple(dataclasses.replace(plan, quantize_type=name) for name in names)


def _refuse(flag: str) -> None:
    if FLAGS[flag].present:
        raise ValueError(f"--{flag} and --compare name the same thing; drop one of the two")
