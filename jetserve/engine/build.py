"""From what a user asked for to an engine that is ready: find the model, load it, set up the runner."""

import dataclasses
import hashlib
import json
import logging
import os
from pathlib import Path

import jax
import jax.numpy as jnp

from jetserve import convert, default_model, making
from jetserve.checkpoint import hub, load
from jetserve.checkpoint.load import LoadedModel, Progress, silent
from jetserve.checkpoint.manifest import FORMAT_VERSION
from jetserve.checkpoint.random_weights import random_model
from jetserve.config import EngineConfig, ModelSource
from jetserve.engine.engine import Engine
from jetserve.engine.runner import Runner
from jetserve.kernels import native
from jetserve.models import base, presets
from jetserve.parallel.mesh import make_mesh
from jetserve.parallel.processes import Processes, Settings
from jetserve.quantize.recipe import KEEP, NONE, Recipe
from jetserve.quantize.recipe_file import read_rules
from jetserve.tokenizer import Tokenizer
from jetserve.tokenizer.of_bytes import byte_tokenizer

logger = logging.getLogger(__name__)

DEFAULT_MAX_LENGTH = 2048


def use_cache_dir(cache_dir: Path) -> None:
    """Keeps compiled programs, and the kernels for CPUs, in a folder, so that a second start compiles nothing."""
    native.use_cache_dir(cache_dir)
    jax.config.update("jax_compilation_cache_dir", str(cache_dir / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def load_source(
    source: ModelSource, config: EngineConfig, *, devices: list[jax.Device] | None = None, progress: Progress = silent
) -> LoadedModel:
    """Loads the model that `source` names onto the mesh that `config` asks for, with the tokenizer that it names.

    Raises:
      CheckpointError, ValueError, RuntimeError: see `load.load_model` and `default_model.fetch`.
    """
    if source.model_name is not None and source.checkpoint_path is None:
        loaded = _random_model(source, config, devices, progress)
    else:
        loaded = _load_checkpoint(source, config, devices, progress)
    if source.tokenizer_path is not None:
        loaded = dataclasses.replace(loaded, tokenizer=Tokenizer.from_folder(source.tokenizer_path))
    return loaded


def _load_checkpoint(
    source: ModelSource, config: EngineConfig, devices: list[jax.Device] | None, progress: Progress
) -> LoadedModel:
    if source.checkpoint_path is None:
        source, path = _default_checkpoint(source)
    else:
        path = hub.local_path(source.checkpoint_path)
        _check_is_preset(source, path)
    return load.load_model(
        path,
        quantize_type=source.quantize_type,
        block_size=source.block_size,
        symmetric=source.symmetric,
        rules=None if source.quantize_recipe is None else read_rules(source.quantize_recipe),
        quantize_activation=source.quantize_activation,
        mesh=make_mesh(config.mesh, devices),
        dtype=jnp.dtype(config.dtype),
        exact_activations=source.cpu_activation == "float32",
        progress=progress,
    )


def _random_model(
    source: ModelSource, config: EngineConfig, devices: list[jax.Device] | None, progress: Progress
) -> LoadedModel:
    """The preset that `source` names, with random weights and a token for every byte."""
    assert source.model_name is not None
    assert source.size is not None
    logger.warning("%s has random weights: its texts mean nothing, only its speed does", model_name(source))
    loaded = random_model(
        presets.preset(source.model_name, source.size),
        quantize_type=source.quantize_type,
        block_size=source.block_size,
        symmetric=source.symmetric,
        quantize_activation=source.quantize_activation,
        mesh=make_mesh(config.mesh, devices),
        dtype=jnp.dtype(config.dtype),
        exact_activations=source.cpu_activation == "float32",
        progress=progress,
    )
    return dataclasses.replace(loaded, tokenizer=byte_tokenizer())


def _check_is_preset(source: ModelSource, path: Path) -> None:
    """Raises ValueError if a checkpoint is not of the preset that `source` names beside it, saying how they differ."""
    if source.model_name is None or source.size is None:
        return
    hf_config = presets.preset(source.model_name, source.size)
    wanted = base.find(hf_config["model_type"]).Config.from_hf(hf_config)
    opened = load.open_model(path, quantize_type=source.quantize_type)
    found = {"model_type": opened.hf_config["model_type"], "layers": opened.config.num_layers, **opened.config.sizes}
    expected = {"model_type": hf_config["model_type"], "layers": wanted.num_layers, **wanted.sizes}
    if found != expected:
        differing = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
        raise ValueError(
            f"{path} is no {_preset_name(source)}: "
            + ", ".join(f"{name} is {found.get(name)}, expected {expected.get(name)}" for name in differing)
            + "; drop --model_name and --size, or name what it is"
        )


def _default_checkpoint(source: ModelSource) -> tuple[ModelSource, Path]:
    """The default model converted as `source` asks for, made once and kept, and what is left to ask when it is loaded.

    Floats are not kept: they take six times the space of the file that they come from, and load as fast from that. Nor
    is what a recipe file makes: it may change.
    """
    gguf = default_model.fetch(source.cache_dir)
    quantize_type = source.quantize_type or KEEP
    if quantize_type == NONE or source.quantize_recipe is not None:
        return source, gguf
    recipe = Recipe.from_settings(
        quantize_type, block_size=source.block_size, symmetric=source.symmetric, source_quantized=True
    )
    form = "" if recipe.linear is None else f"-{recipe.linear.block_size}-{recipe.linear.symmetric}"
    path = gguf.parent / f"{quantize_type}{form}-{FORMAT_VERSION}"
    if not path.exists():
        with making.room(gguf.parent, "fetching the default model or converting it") as room:
            if not path.exists():
                logger.info("converting the default model to %s, once, into %s", quantize_type, path)
                convert.convert(
                    gguf,
                    room / path.name,
                    quantize_type=quantize_type,
                    block_size=source.block_size,
                    symmetric=source.symmetric,
                )
                os.rename(room / path.name, path)
    return dataclasses.replace(source, quantize_type=None, block_size=None, symmetric=None), path


def tokenizer_of(loaded: LoadedModel) -> Tokenizer:
    """The tokenizer of a loaded model. Raises ValueError if it has none."""
    if loaded.tokenizer is None:
        raise ValueError("the checkpoint has no tokenizer beside it; name one with --tokenizer_path")
    return loaded.tokenizer


def model_name(source: ModelSource) -> str:
    """What a report calls the model."""
    return source.checkpoint_path or _preset_name(source) or default_model.NAME


def _preset_name(source: ModelSource) -> str | None:
    return None if source.model_name is None else f"{source.model_name}-{source.size}"


def settings_of(source: ModelSource, config: EngineConfig, max_length: int | None) -> Settings:
    """Of what decides which programs run: the same on every process that runs them together."""
    values = dataclasses.asdict(source) | dataclasses.asdict(config) | {"max_length": max_length}
    paths = ("checkpoint_path", "tokenizer_path", "quantize_recipe", "cache_dir")
    settings = {name: str(value) for name, value in values.items() if name not in paths}
    return settings | {"checkpoint": _description(source)}


def _description(source: ModelSource) -> str:
    """A digest of what a checkpoint says of itself: its config and its tensors, not what these hold."""
    if source.checkpoint_path is None:
        return model_name(source)
    opened = load.open_model(hub.local_path(source.checkpoint_path), quantize_type=source.quantize_type)
    tensors = {name: repr(info) for name, info in opened.source.tensors.items()}
    said = json.dumps([opened.hf_config, tensors], sort_keys=True, default=repr)
    return hashlib.sha256(said.encode()).hexdigest()[:12]


def build_engine(
    source: ModelSource,
    config: EngineConfig,
    *,
    max_length: int | None = None,
    progress: Progress = silent,
    processes: Processes | None = None,
) -> Engine:
    """Loads a model and puts an engine around it.

    Args:
      source: the model.
      config: limits; its `max_length` is replaced.
      max_length: tokens a sequence may have; None takes what the model was made for, up to 2048.
      progress: wraps the sequence of tensors that are loaded.
      processes: that run the model together; None for this one alone.

    Raises:
      ValueError: if `max_length` is more than the model was made for, or there is no tokenizer.
    """
    use_cache_dir(source.cache_dir)
    loaded = load_source(source, config, progress=progress)
    return make_engine(loaded, config, max_length=max_length, processes=processes)


def make_engine(
    loaded: LoadedModel, config: EngineConfig, *, max_length: int | None = None, processes: Processes | None = None
) -> Engine:
    """Puts an engine around a loaded model. Arguments and errors are `build_engine`'s."""
    limit = loaded.config.max_position
    if max_length is not None and max_length > limit:
        raise ValueError(f"--max_cache_length is {max_length}, but the model was made for up to {limit} tokens")
    config = dataclasses.replace(config, max_length=max_length or min(DEFAULT_MAX_LENGTH, limit))
    tokenizer = tokenizer_of(loaded)
    try:
        runner = Runner(loaded.model, config, make_mesh(config.mesh), processes)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ValueError(
            f"the KV cache of {config.num_pages} pages of {config.cache.page_size} tokens does not fit in memory: lower"
            f" --batch_size ({config.max_sequences}), --max_cache_length ({config.max_length}) or --num_pages, or set"
            " --quantize_kv_cache"
        ) from error
    engine = Engine(runner, tokenizer)
    if engine.max_length < config.max_length:
        logger.warning(
            "the KV cache holds %d tokens (--num_pages), which is all that a prompt and its answer may have together;"
            " --max_cache_length is %d",
            engine.max_length,
            config.max_length,
        )
    return engine
