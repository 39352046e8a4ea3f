"""The command line of `python -m jetserve.evaluate`, in `flags`' way."""

import dataclasses
from typing import Any

from absl import flags

from jetserve.config import EvaluateConfig, ModelSource, TaskSettings
from jetserve.flags import FLAGS, QUANTIZE_TYPES, define, model_source, path_of

OF_ONE_MODEL = ("quantize_type", "quantize_weights", "block_size", "symmetric", "quantize_recipe")
"""Flags that --model's own settings take the place of."""


def define_evaluate() -> None:
    """Which models are compared, and by what."""
    define(
        flags.DEFINE_multi_string,
        "model",
        [],
        "One of the models to compare, may be repeated: what the checkpoint is quantized to and how, such as"
        ' "int4_blockwise symmetric=False block_size=64", or the path of another checkpoint. Unset: the checkpoint as'
        " the other flags say.",
    )
    define(flags.DEFINE_string, "text_file", None, "A text for perplexity, UTF-8.")
    define(flags.DEFINE_integer, "window", 1024, "Tokens a window of the text; windows do not overlap.", lower_bound=2)
    define(flags.DEFINE_integer, "max_tokens", None, "Tokens of the text that are read (unset: all).", lower_bound=2)
    define(
        flags.DEFINE_string,
        "reference_checkpoint",
        None,
        "A checkpoint that the text's probabilities are compared with, in floating point.",
    )
    define(flags.DEFINE_list, "tasks", [], "lm-eval's tasks, separated by commas; takes the extra eval.")
    define(flags.DEFINE_string, "include_path", None, "A folder with further tasks, lm-eval's YAML files.")
    define(flags.DEFINE_integer, "num_fewshot", None, "Examples in a prompt (unset: the task's).", lower_bound=0)
    define(flags.DEFINE_integer, "limit", None, "Documents of each task (unset: all).", lower_bound=1)
    define(flags.DEFINE_string, "output_file", None, "Where the JSON of the last line is written too.")
    define(flags.DEFINE_string, "plot", None, "A PNG to write: perplexity against bits a weight; takes the extra plot.")


def evaluate_config() -> EvaluateConfig:
    """From `define_evaluate`.

    Raises:
      ValueError: for flags without an effect, and if nothing is to be measured.
    """
    if FLAGS.text_file is None:
        for name in ("window", "max_tokens", "reference_checkpoint", "plot"):
            if FLAGS[name].present:
                raise ValueError(f"--{name} takes a --text_file, which is not set; set it, or drop --{name}")
    if not FLAGS.tasks:
        for name in ("include_path", "num_fewshot", "limit"):
            if FLAGS[name].present:
                raise ValueError(f"--{name} takes --tasks, which are not set; set them, or drop --{name}")
    tasks = TaskSettings(
        tasks=tuple(FLAGS.tasks),
        include_path=path_of(FLAGS.include_path),
        num_fewshot=FLAGS.num_fewshot,
        limit=FLAGS.limit,
    )
    return EvaluateConfig(
        text_file=path_of(FLAGS.text_file),
        window=FLAGS.window,
        max_tokens=FLAGS.max_tokens,
        reference_checkpoint=FLAGS.reference_checkpoint,
        tasks=tasks if FLAGS.tasks else None,
        output_file=path_of(FLAGS.output_file),
        plot=path_of(FLAGS.plot),
    )


def evaluate_sources() -> dict[str, ModelSource]:
    """The models by what they are called: --model's words, or the one that the other flags name.

    Raises:
      ValueError: for flags that --model's settings take the place of.
    """
    if not FLAGS.model:
        return {FLAGS.checkpoint_path or "default": model_source()}
    for name in OF_ONE_MODEL:
        if FLAGS[name].present:
            raise ValueError(f"--{name} contradicts --model, which has settings of its own; drop one of the two")
    source = model_source()
    return {description: named(source, description) for description in FLAGS.model}


def named(source: ModelSource, description: str) -> ModelSource:
    """One of the models to compare: a quantize type, or a path or hub id; then settings as name=value.

    Raises:
      ValueError: for a description that is empty, and settings that are not known.
    """
    words = description.split()
    if not words:
        raise ValueError("--model is empty; expected a quantize type or a checkpoint, then settings")
    changes: dict[str, Any] = {"quantize_type" if words[0] in QUANTIZE_TYPES else "checkpoint_path": words[0]}
    for word in words[1:]:
        name, _, value = word.partition("=")
        if name == "symmetric" and value in ("True", "False"):
            changes[name] = value == "True"
        elif name == "block_size" and value.isdecimal():
            changes[name] = int(value)
        elif name == "quantize_type" and value in QUANTIZE_TYPES:
            changes[name] = value
        else:
            raise ValueError(
                f"--model={description!r} has the setting {word!r}; expected quantize_type=TYPE, block_size=N,"
                " symmetric=True or symmetric=False"
            )
    return dataclasses.replace(source, **changes)
