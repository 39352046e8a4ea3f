"""What every model offers, and how its weights' names map to a checkpoint's.

A model file offers `Config` (with `from_hf`), `Model`, and `WEIGHTS`: the path of every parameter in jetserve to the
tensor's Hugging Face name, with `{i}` for the layer, or to a `Source` for one that is part of a tensor. Knows nothing
of files.
"""

import dataclasses
import enum
import importlib
import math
import pkgutil
import re
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
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

    @property
    def sizes(self) -> Mapping[str, int]:
        """The size of every letter."""
        ...


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


SHARED = ("base", "decoder", "presets")
"""Modules beside the models that are none."""


def supported() -> list[str]:
    """Every Hugging Face `model_type` that has a file here."""
    package = importlib.import_module("jetserve.models")
    return sorted(info.name for info in pkgutil.iter_modules(package.__path__) if info.name not in SHARED)


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


COUNTS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "max_position_embeddings", "moe_intermediate_size"),
    *(
        "n_embd",
        "n_inner",
        "n_layer",
        "n_head",
        "n_positions",
        "ffn_dim",
        "num_kv_heads",
        "decoder_sparse_step",
        "no_rope_layer_interval",
    ),
)
NUMBERS = (
    *("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "rope_theta", "partial_rotary_factor"),
    *("query_pre_attn_scalar", "attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"),
)
FLAGS = (
    *("tie_word_embeddings", "attention_bias", "mlp_bias", "use_bias", "use_qkv_bias", "bias", "use_sliding_window"),
    *("alibi", "multi_query", "parallel_attn", "new_decoder_architecture", "use_parallel_residual", "norm_topk_prob"),
)


def check_values(hf: Mapping[str, Any]) -> None:
    """Refuses values that a key of a Hugging Face config cannot have in any model. Null is for each model to take.

    Raises:
      ValueError: naming the key, its value and what was expected.
    """
    for key, value in hf.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is None:
            continue
        if key in COUNTS and not (is_number and isinstance(value, int) and value > 0):
            raise ValueError(f"the model's config has {key}={value!r}; expected an integer of 1 or more")
        if key in NUMBERS and not (is_number and 0 < value < math.inf):
            raise ValueError(f"the model's config has {key}={value!r}; expected a number above 0")
        if key in FLAGS and not isinstance(value, bool):
            raise ValueError(f"the model's config has {key}={value!r}; expected true or false")


class Role(enum.Enum):
    """What a parameter is to quantization.

    Linear layers take it, embeddings and heads stay finer; norms, biases, learned positions and routers stay in float.
    """

    LINEAR = "linear"
    EMBEDDING = "embedding"
    FLOAT = "float"


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a parameter stands in a checkpoint, if not as the whole of one tensor.

    Attributes:
      name: Hugging Face's, `{i}` for the layer. With the small letter of an axis, it is the tensors of all of them
        together: `{e}` of all experts, `{n}` of all query heads.
      part: of a tensor that fuses several parameters: its place among them, from 0. Their sizes are the parameters'.
      per: the letters of what the fused parts are repeated for: "K" for [q k v] of one KV head, then of the next; "EF"
        for a row of each part in turn, in all experts. None is all of one part, then all of the next.
      transposed: whether its floats stand as [K, N], against Hugging Face's custom (the Conv1D of GPT-2).
      alias: another name that the tensor has in some checkpoints.
      stacked: whether it holds all experts, on an axis of its own ahead; their floats stand as [E, K, N].
    """

    name: str
    part: int | None = None
    per: str | None = None
    transposed: bool = False
    alias: str | None = None
    stacked: bool = False


Weights = Mapping[str, str | Source]

_COUNTED = re.compile(r"\{([a-z])\}\.")
"""In the name of a `Source` without its layer: of what there is a tensor for each."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin:
    """Which rows of a source's tensors, in Hugging Face's layout, are a parameter's outputs.

    The tensors are taken as one, each below the one before. Its rows are cut into groups of `group`, and those from
    `start` to `stop` of every group are the parameter's.

    Attributes:
      names: of the tensors; several are those of the experts, or of the heads.
      height: rows of each tensor.
      start, stop, group: see above.
      transposed, stacked: see `Source`.
    """

    names: tuple[str, ...]
    height: int
    start: int
    stop: int
    group: int
    transposed: bool = False
    stacked: bool = False

    def rows(self, start: int, stop: int) -> np.ndarray:
        """The rows of the tensors taken as one that are rows [start, stop) of the parameter's, in order."""
        index = np.arange(start, stop)
        size = self.stop - self.start
        return index // size * self.group + self.start + index % size


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter of a model as loading sees it.

    Attributes:
      path: in jetserve, dotted: "layers.0.attention.q.weight".
      source: its own name in Hugging Face's manner, which no other parameter has: that of its tensor or, for a part of
        one, that with the parameter's own name in it ("h.0.query_key_value.q.weight").
      origin: where it stands in a checkpoint of any foreign format.
      shape: in jetserve's checkpoints: a matrix [K, N] (Hugging Face's [N, K] transposed), of experts [K, E * N], or a
        vector.
      axes: of a matrix; None for vectors.
      linear: the layer of a matrix; None for vectors.
      output_axes: of a matrix, of its bias, or of a norm's scale: (letter, size) of the last array axis.
      variable: the place in the model that takes the array.
    """

    path: str
    source: str
    origin: Origin
    shape: tuple[int, ...]
    axes: Axes | None
    linear: Linear | None
    output_axes: tuple[tuple[str, int], ...]
    role: Role
    variable: nnx.Param

    @property
    def whole(self) -> bool:
        """Whether it is the whole of the tensor of its name, as that stands."""
        origin = self.origin
        return origin.names == (self.source,) and origin.stop - origin.start == origin.height and not origin.transposed

    @property
    def layer(self) -> int | None:
        """The number of the layer that it is part of; None for what lies before and after the layers."""
        found = re.search(r"\.(\d+)\.", self.path)
        return int(found.group(1)) if found else None


_ROLES = {"V": Role.EMBEDDING, "P": Role.FLOAT}
"""Of matrices, by their first output letter."""


def _role(axes: Axes | None) -> Role:
    if axes is None or axes.is_router:
        return Role.FLOAT
    return _ROLES.get(axes.output[0][0], Role.LINEAR)


def parameters(model: Model, weights: Weights) -> list[Parameter]:
    """Every parameter of a model in the order of its layers, with its source by the model file's `WEIGHTS`.

    Raises:
      ValueError: for a parameter that the table lacks, and for parts of a tensor that do not make up a whole.
    """
    found: list[tuple[Source, Parameter]] = []
    for module_path, module in nnx.iter_modules(model):
        for name in ("weight", "bias", "scale"):
            variable = getattr(module, name, None)
            if not isinstance(variable, nnx.Param):
                continue
            path = ".".join(str(part) for part in (*module_path, name))
            source = _source(path, weights)
            linear = module if name == "weight" and isinstance(module, Linear) else None
            axes = None if linear is None else linear.axes
            shape = variable.get_value().shape if axes is None else axes.shape
            parameter = Parameter(
                path=path,
                source=_own_name(source, path),
                origin=Origin(names=(source.name,), height=shape[-1], start=0, stop=shape[-1], group=shape[-1]),
                shape=shape,
                axes=axes,
                linear=linear,
                output_axes=module.axes.output
                if isinstance(module, Linear)
                else _vector_axes(path, shape, model.config),
                role=_role(axes),
                variable=variable,
            )
            found.append((source, parameter))
    placed = [dataclasses.replace(p, origin=_origin(s, p, found, model.config.sizes)) for s, p in found]
    return sorted(placed, key=lambda p: [int(part) if part.isdigit() else -1 for part in p.path.split(".")][:2])


def _vector_axes(path: str, shape: tuple[int, ...], config: ModelConfig) -> tuple[tuple[str, int], ...]:
    """Of a norm's scale, and of sinks; that of all KV heads together goes with them where devices repeat them."""
    if path.endswith(".sinks.bias"):
        return (("N", shape[-1]),)
    heads = ("K", config.sizes["K"]), ("H", config.sizes["H"])
    if path.endswith(".k_norm.scale") and shape[-1] == heads[0][1] * heads[1][1]:
        return heads
    return (("D", shape[-1]),)


def _source(path: str, weights: Weights) -> Source:
    pattern = re.sub(r"\.(\d+)\.", ".{i}.", path)
    if pattern not in weights:
        raise ValueError(f"the model's WEIGHTS table has no entry for {pattern!r}")
    entry = weights[pattern]
    source = Source(entry) if isinstance(entry, str) else entry
    layer = re.search(r"\.(\d+)\.", path)
    return dataclasses.replace(source, name=source.name.replace("{i}", layer.group(1) if layer else ""))


def _own_name(source: Source, path: str) -> str:
    name = _COUNTED.sub("", source.name)
    if source.part is None:
        return name
    stem, _, leaf = name.rpartition(".")
    return f"{stem}.{path.split('.')[-2]}.{leaf}"


def _origin(
    source: Source, parameter: Parameter, found: Sequence[tuple[Source, Parameter]], sizes: Mapping[str, int]
) -> Origin:
    """Where a parameter stands, by the parameters that share its tensor."""
    fused = [(s.part, p) for s, p in found if s.name == source.name] if source.part is not None else [(0, parameter)]
    heights = [p.shape[-1] for _, p in sorted(fused, key=lambda entry: entry[0] or 0)]
    repeats = math.prod(sizes[letter] for letter in source.per or "")
    if {part for part, _ in fused} != set(range(len(fused))) or any(height % repeats for height in heights):
        raise ValueError(
            f"the model's WEIGHTS table takes {source.name} for {', '.join(p.path for _, p in fused)}, with {heights}"
            f" rows in {repeats} groups; expected its parts to be numbered from 0, each once, and to fill the groups"
        )
    counted = _COUNTED.search(source.name)
    count = 1 if counted is None else sizes[counted[1].upper()]
    start = sum(heights[: source.part or 0]) // repeats
    return Origin(
        names=tuple(_COUNTED.sub(f"{number}.", source.name) for number in range(count)),
        height=sum(heights) // count,
        start=start,
        stop=start + parameter.shape[-1] // repeats,
        group=sum(heights) // repeats,
        transposed=source.transposed,
        stacked=source.stacked,
    )
