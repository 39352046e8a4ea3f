"""What the models share: their shape as a config tells it, and the way from tokens through layers to logits.

A model file reads its config's own keys with the help of what is here, and hands over its layers. Not a model itself.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from flax import nnx

from jetserve.kernels.attention import KVPages, RaggedBatch
from jetserve.layers.attention import Attention
from jetserve.layers.block import Block, ParallelBlock
from jetserve.layers.embed import Embed, LearnedPositions
from jetserve.layers.linear import Linear
from jetserve.layers.mlp import ACTIVATIONS, MLP
from jetserve.layers.norm import LayerNorm
from jetserve.layers.rope import Rope
from jetserve.layers.stack import traced_once
from jetserve.models import base


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The shape of a decoder; each model adds what it has besides.

    Attributes of those that say less than their names:
      max_position: tokens that the model was made for.
      tied: whether the output head is the embedding.
      embedding_multiplier: of the embeddings before the first layer.
      logit_multiplier, logit_cap: logits are `cap * tanh(multiplier * head(x) / cap)`.
    """

    hidden_size: int
    mlp_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    max_position: int
    norm_epsilon: float
    tied: bool
    activation: str
    embedding_multiplier: float = 1.0
    logit_multiplier: float = 1.0
    logit_cap: float | None = None

    FOREIGN: ClassVar[tuple[str, ...]] = ()
    """Keys that a relative reads, whose code is shared, but transformers not in this model."""

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        """From a Hugging Face config.json.

        Raises:
          ValueError: for a missing key or an impossible value, for heads that do not make groups, and for what is not
            built, naming it.
        """
        hf = {key: value for key, value in hf.items() if key not in cls.FOREIGN}
        base.check_values(hf)
        base.check_switches(hf, {"is_causal": True})
        try:
            config = cls(**cls.fields(hf))
        except KeyError as missing:
            raise ValueError(
                f"the model's config has no {missing}; expected every key of a {hf.get('model_type')} config"
            ) from None
        for field in dataclasses.fields(config):
            value = getattr(config, field.name)
            if field.type in (int, float) and value is None:
                raise ValueError(f"the model's config says null where its {field.name} is meant; expected a number")
        if config.num_heads % config.num_kv_heads:
            raise ValueError(
                f"num_attention_heads ({config.num_heads}) is not a multiple of num_key_value_heads"
                f" ({config.num_kv_heads})"
            )
        if config.activation not in ACTIVATIONS:
            raise ValueError(
                f"the model's activation is {config.activation!r}, which is not built; expected one of"
                f" {', '.join(ACTIVATIONS)}"
            )
        return config

    @classmethod
    def fields(cls, hf: Mapping[str, Any]) -> dict[str, Any]:
        """The constructor's arguments. Raises KeyError for a missing key, ValueError for what is not built."""
        raise NotImplementedError

    @property
    def sizes(self) -> dict[str, int]:
        """The size of every letter."""
        return {
            "D": self.hidden_size,
            "F": self.mlp_size,
            "N": self.num_heads,
            "K": self.num_kv_heads,
            "H": self.head_size,
            "V": self.vocab_size,
        }


def shape(
    hf: Mapping[str, Any], *, tied: bool, names: Mapping[str, str] | None = None, **others: Any
) -> dict[str, Any]:
    """The fields of `Config` that most models name alike.

    Args:
      hf: the config.
      tied: what transformers takes where `tie_word_embeddings` is not said.
      names: Hugging Face's usual key to the one that this model has in its place.
      others: fields that are known otherwise.
    """
    key = {name: name for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")} | dict(names or {})
    heads = hf[key["num_attention_heads"]]
    hidden = hf[key["hidden_size"]]
    fields = {
        "hidden_size": hidden,
        "num_layers": hf[key["num_hidden_layers"]],
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_size": hidden // heads,
        "vocab_size": hf["vocab_size"],
        "max_position": hf.get(key.get("max_position_embeddings", "max_position_embeddings"), 2048),
        "tied": hf.get("tie_word_embeddings", tied),
        **others,
    }
    # Last, so that those that have another way to say it need no key.
    return fields if "mlp_size" in fields else {**fields, "mlp_size": hf["intermediate_size"]}


def grouped_heads(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of models whose KV heads may be fewer than the query heads, and of a size of their own."""
    heads = hf["num_attention_heads"]
    return {
        "num_kv_heads": hf.get("num_key_value_heads") or heads,
        "head_size": hf.get("head_dim") or hf["hidden_size"] // heads,
    }


def rope(
    hf: Mapping[str, Any],
    head_size: int,
    *,
    theta: float = 10000.0,
    layer_type: str | None = None,
    partial: float = 1.0,
) -> Rope:
    """The rotation that a config asks for.

    Args:
      hf: the config; transformers 5 writes rope_parameters in place of rope_theta and rope_scaling.
      head_size: H.
      theta: where the config says none.
      layer_type: which of the layers' rotations, where a config has several.
      partial: the share of a head's channels that the model rotates; a config that says another is refused.
    """
    scaling = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise ValueError(f"the model's config has rope parameters {scaling!r}; expected an object")
    if layer_type is not None and layer_type in scaling:
        scaling = scaling[layer_type]
    for part in (hf, scaling):
        base.check_switches(part, {"partial_rotary_factor": partial})
    found = scaling.get("rope_theta") or hf.get("rope_theta") or theta
    return Rope.from_hf(int(head_size * partial), found, scaling)


def partial_rotary_factor(hf: Mapping[str, Any], default: float) -> float:
    """The share of a head's channels that are rotated, where old and new configs write it."""
    for part in (hf.get("rope_parameters") or {}, hf):
        if (found := part.get("partial_rotary_factor")) is not None:
            return found
    return default


def windows(
    hf: Mapping[str, Any], *, window: int | None, layer_types: Sequence[str], num_layers: int
) -> tuple[int | None, ...]:
    """The sliding window of every layer, None for those that see all.

    Args:
      hf: the config, whose own layer_types are taken where it has any.
      window: tokens, of the layers that slide.
      layer_types: what transformers takes where the config has none.
      num_layers: of the model.

    Raises:
      ValueError: for kinds of layers that are not built, and for a list of another length.
    """
    kinds = hf.get("layer_types") or layer_types
    unknown = sorted(set(kinds) - {"sliding_attention", "full_attention"})
    if unknown:
        raise ValueError(f"layer_types has {', '.join(unknown)}, which is not built")
    if len(kinds) != num_layers:
        raise ValueError(f"layer_types has {len(kinds)} entries; expected one for each of the {num_layers} layers")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


class Decoder(base.Model):
    """See `base.Model`."""

    def __init__(
        self,
        config: Config,
        layers: Sequence[nnx.Module],
        *,
        norm: nnx.Module,
        embed_norm: nnx.Module | None = None,
        positions: LearnedPositions | None = None,
    ) -> None:
        self.config = config
        self.embed = Embed(config.sizes)
        self.positions = positions
        self.embed_norm = embed_norm
        self.layers = nnx.List(layers)
        self.norm = norm
        self.head = None if config.tied else Linear("D -> V", config.sizes)

    def __call__(
        self, batch: RaggedBatch, cache: tuple[KVPages, ...], *, dtype: jnp.dtype
    ) -> tuple[jax.Array, tuple[KVPages, ...]]:
        x = self._embedded(batch, dtype)
        updated = []
        for layer, pages in zip(self.layers, cache, strict=True):
            x, pages = traced_once(layer, x, batch, pages)
            updated.append(pages)
        return self.norm(x), tuple(updated)

    def _embedded(self, batch: RaggedBatch, dtype: jnp.dtype) -> jax.Array:
        x = self.embed.lookup(batch.tokens, dtype)
        if self.config.embedding_multiplier != 1.0:
            x *= jnp.asarray(self.config.embedding_multiplier, dtype)
        if self.positions is not None:
            x += self.positions(batch.positions, dtype)
        return x if self.embed_norm is None else self.embed_norm(x)

    def logits(self, hidden: jax.Array) -> jax.Array:
        logits = (self.head or self.embed)(hidden, out_dtype=jnp.float32) * self.config.logit_multiplier
        logits = logits[:, : self.config.vocab_size]  # the head may have been padded, see `rules.Layout`
        cap = self.config.logit_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


class LayerNormDecoder(Decoder):
    """A decoder with layer norms and feed-forward layers without gate, as GPT-2 and what came of it.

    Args:
      config: as `Decoder`'s; all that these take of it.
      attention: further arguments of every layer's `Attention`.
      mlp_bias: whether feed-forward layers have biases.
      block: how layers are joined.
      own_mlp_norm: whether feed-forward layers have a norm of their own.
      normed_embedding: whether a norm follows the embedding.
      positions: as `Decoder`'s.
    """

    def __init__(
        self,
        config: Config,
        *,
        attention: Mapping[str, Any],
        mlp_bias: bool,
        block: type[Block] | type[ParallelBlock] = Block,
        own_mlp_norm: bool = True,
        normed_embedding: bool = False,
        positions: LearnedPositions | None = None,
    ) -> None:
        def norm() -> LayerNorm:
            return LayerNorm(config.hidden_size, epsilon=config.norm_epsilon)

        layers = [
            block(
                attention_norm=norm(),
                attention=Attention(config.sizes, **attention),
                mlp_norm=norm() if own_mlp_norm else None,
                mlp=MLP(config.sizes, activation=config.activation, bias=mlp_bias),
            )
            for _ in range(config.num_layers)
        ]
        embed_norm = norm() if normed_embedding else None
        super().__init__(config, layers, norm=norm(), embed_norm=embed_norm, positions=positions)
