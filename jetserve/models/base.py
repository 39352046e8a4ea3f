"""What every model offers, and how its weights' names map to a checkpoint's.

A model file offers `Config` (with `from_hf`), `Model`, and `WEIGHTS`: the path of every parameter in jetserve to the
tensor's Hugging Face name, with `{i}` for the layer. Knows nothing of files.
"""

import dataclasses
import enum
import importlib
import pkgutil
import re
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jetserve.kernels.attention import KVPages, RaggedBatch
from jetserve.layers.linear import Linear
from jetserve.parallel.rules import Axes


class ModelConfig(Protocol):
    """What the layers above read of any model's config."""

    num_layers: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    max_position: int
    """Tokens that the model was made for."""


class Model(nnx.Module):
    """A decoder over a ragged batch. Constructed without memory; a checkpoint's arrays come later."""

    config: Any

    def __call__(
        self, batch: RaggedBatch, cache: tuple[KVPages, ...], *, dtype: jnp.dtype
    ) -> tuple[jax.Array, tuple[KVPages, ...]]:
        """Hidden states [T, D] in `dtype`, and every layer's pages with this batch in them."""
        raise NotImplementedError

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[S, D] -> float32 [S, V]."""
        raise NotImplementedError


def supported() -> list[str]:
    """Every Hugging Face `model_type` that has a file here."""
    package = importlib.import_module("jetserve.models")
    return sorted(info.name for info in pkgutil.iter_modules(package.__path__) if info.name != "base")


def find(model_type: object) -> ModuleType:
    """The module of a Hugging Face `model_type`.

    Raises:
      ValueError: if there is none, naming those that there are.
    """
    if model_type not in supported():
        raise ValueError(f"the model's architecture is {model_type!r}; supported are {', '.join(supported())}")
    return importlib.import_module(f"jetserve.models.{model_type}")


def check_switches(hf: Mapping[str, Any], built: Mapping[str, Any]) -> None:
    """Refuses a Hugging Face config, or a part of one, that asks for what is not built.

    Args:
      hf: the config; a key that is absent or null is as built.
      built: the only value that is, for every switch that changes what the model computes.

    Raises:
      ValueError: naming the switch, its value and the one that is built.
    """
    for key, value in built.items():
        if hf.get(key) not in (None, value):
            raise ValueError(f"the model's config asks for {key}={hf[key]!r}, which is not built; only {value!r} is")


class Role(enum.Enum):
    """What a parameter is to quantization: linear layers take it, embeddings and heads stay finer, vectors never do."""

    LINEAR = "linear"
    EMBEDDING = "embedding"
    VECTOR = "vector"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter of a model as loading sees it.

    Attributes:
      path: in jetserve, dotted: "layers.0.attention.q.weight".
      source: its Hugging Face name.
      shape: in jetserve: a matrix [K, N] (Hugging Face's [N, K] transposed) or a vector.
      axes: of a matrix; None for vectors.
      output_axes: of a matrix, of its bias, or of a norm's scale: (letter, size) of the last array axis.
      variable: the place in the model that takes the array.
    """

    path: str
    source: str
    shape: tuple[int, ...]
    axes: Axes | None
    output_axes: tuple[tuple[str, int], ...]
    role: Role
    variable: nnx.Param


def parameters(model: nnx.Module, weights: Mapping[str, str]) -> list[Parameter]:
    """Every parameter of a model in the order of its layers, with its source by the model file's `WEIGHTS`.

    Raises:
      ValueError: for a parameter that the table lacks.
    """
    found = []
    for module_path, module in nnx.iter_modules(model):
        for name in ("weight", "bias", "scale"):
            variable = getattr(module, name, None)
            if not isinstance(variable, nnx.Param):
                continue
            path = ".".join(str(part) for part in (*module_path, name))
            pattern = re.sub(r"\.(\d+)\.", ".{i}.", path)
            if pattern not in weights:
                raise ValueError(f"the model's WEIGHTS table has no entry for {pattern!r}")
            layer = re.search(r"\.(\d+)\.", path)
            shape = variable.get_value().shape
            axes = module.axes if name == "weight" and isinstance(module, Linear) else None
            output_axes = module.axes.output if isinstance(module, Linear) else (("D", shape[-1]),)
            on_vocabulary = axes is not None and axes.output[0][0] == "V"
            role = Role.VECTOR if axes is None else Role.EMBEDDING if on_vocabulary else Role.LINEAR
            found.append(
                Parameter(
                    path=path,
                    source=weights[pattern].format(i=layer.group(1) if layer else ""),
                    shape=shape,
                    axes=axes,
                    output_axes=output_axes,
                    role=role,
                    variable=variable,
                )
            )
    return sorted(found, key=lambda p: [int(part) if part.isdigit() else -1 for part in p.path.split(".")][:2])
