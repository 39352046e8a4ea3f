"""Scales of channels between two layers: what multiplies the inputs of one is divided out of what makes them.

Owns which linear layers have something before them that can take their scales, and how it takes them. Exact: a layer
computes what it did before. Knows nothing of what scales are good for.

Letters: K inputs of linear layers, C channels of what makes them, E experts.
"""

import dataclasses
from collections.abc import Iterator

import jax
import numpy as np
from flax import nnx

from jetserve.layers.attention import Attention
from jetserve.layers.block import Block, ParallelBlock
from jetserve.layers.linear import Linear
from jetserve.layers.mlp import MLP, GatedMLP
from jetserve.layers.moe import Experts, GatedExperts, MoE, SharedMoE
from jetserve.layers.norm import LayerNorm, RMSNorm

Producer = RMSNorm | LayerNorm | Linear
HOMOGENEOUS = ("relu",)
"""Activations f with f(s x) = s f(x) for every s above 0."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fold:
    """A norm or a linear layer, and the linear layers that take what it makes and nothing else, all of them.

    Attributes:
      producer: its channels pass through nothing on their way but what is linear in each of them.
      consumers: of experts, each expert takes the channels of its own.
      channels: int [K], which channel of the producer each input of the consumers is.
    """

    producer: Producer
    consumers: tuple[Linear, ...]
    channels: np.ndarray

    @property
    def variables(self) -> list[nnx.Param]:
        """All that `apply` changes."""
        made = [self.producer.weight] if isinstance(self.producer, Linear) else [self.producer.scale]
        if not isinstance(self.producer, RMSNorm) and self.producer.bias is not None:
            made.append(self.producer.bias)
        return [*made, *(consumer.weight for consumer in self.consumers)]

    @property
    def of_experts(self) -> bool:
        """Whether every expert has scales of its own."""
        return isinstance(self.producer, Experts)

    def apply(self, scales: jax.Array) -> None:
        """Multiplies the rows of the consumers' weights by scales, and divides the producer's outputs by them.

        Args:
          scales: above 0, float32 [C]; of experts that take from experts, [E, C].
        """
        for consumer in self.consumers:
            consumer.weight.set_value(consumer.weight.get_value() * scales[..., self.channels, None])
        if isinstance(self.producer, RMSNorm):
            offset = self.producer.offset
            self.producer.scale.set_value((self.producer.scale.get_value() + offset) / scales - offset)
            return
        if isinstance(self.producer, Linear):
            self.producer.weight.set_value(self.producer.weight.get_value() / scales[..., None, :])
        else:
            self.producer.scale.set_value(self.producer.scale.get_value() / scales)
        if self.producer.bias is not None:
            self.producer.bias.set_value(self.producer.bias.get_value() / scales.reshape(-1))  # experts' lie end to end


def folds(layer: nnx.Module) -> list[Fold]:
    """All that there are in a layer. Linear layers that are in none have nothing before them to take scales."""
    return [fold for _, module in nnx.iter_modules(layer) for fold in _folds(module)]


def _folds(module: nnx.Module) -> Iterator[Fold]:
    match module:
        case Block():
            for norm, taker in ((module.attention_norm, module.attention), (module.mlp_norm, module.mlp)):
                if norm is not None:
                    yield _after_norm(norm, taker)
        case ParallelBlock(mlp_norm=None):
            yield _after_norm(module.attention_norm, module.attention, module.mlp)
        case ParallelBlock() if module.mlp_norm is not None:
            yield _after_norm(module.attention_norm, module.attention)
            yield _after_norm(module.mlp_norm, module.mlp)
        case Attention():
            yield Fold(producer=module.v, consumers=(module.o,), channels=_shared_heads(module))
        case GatedMLP() | GatedExperts(proportional=True):
            yield _one_to_one(module.up, module.down)
        case MLP() if module.activation in HOMOGENEOUS:
            yield _one_to_one(module.up, module.down)


def _after_norm(norm: nnx.Module, *takers: nnx.Module) -> Fold:
    if not isinstance(norm, RMSNorm | LayerNorm):
        raise TypeError(f"a norm of type {type(norm).__name__} before linear layers; nothing is known of its scales")
    consumers = [linear for taker in takers for linear in _first(taker)]
    return Fold(producer=norm, consumers=tuple(consumers), channels=np.arange(consumers[0].axes.shape[0]))


def _first(module: nnx.Module) -> list[Linear]:
    """The linear layers that take what a module takes: all that it does with it."""
    match module:
        case Attention():
            return [module.q, module.k, module.v]
        case GatedMLP():
            return [module.gate, module.up]
        case MLP():
            return [module.up]
        case SharedMoE():
            mixture = [module.router, module.experts.gate, module.experts.up]
            return [*mixture, module.shared.gate, module.shared.up, module.shared_gate]
        case MoE():
            return [module.router, module.experts.gate, module.experts.up]
    raise TypeError(f"{type(module).__name__} after a norm; nothing is known of the linear layers in it")


def _one_to_one(producer: Linear, consumer: Linear) -> Fold:
    return Fold(producer=producer, consumers=(consumer,), channels=np.arange(consumer.axes.shape[0]))


def _shared_heads(attention: Attention) -> np.ndarray:
    """Every query head takes the channels of its KV head."""
    inputs, made = attention.o.axes.shape[0], attention.v.axes.shape[1]
    by_head = np.arange(made).reshape(-1, 1, attention.head_size)
    return np.broadcast_to(by_head, (len(by_head), inputs // made, attention.head_size)).reshape(-1)
