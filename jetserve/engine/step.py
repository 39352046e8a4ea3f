"""The program of a step: what the runner runs, and what a plan compiles without running.

Knows nothing of requests, or of who holds which page.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jetserve.config import EngineConfig
from jetserve.engine.sampling import best_tokens
from jetserve.kernels.attention import KVPages, RaggedBatch
from jetserve.models.base import Model


def empty_batch(config: EngineConfig, T: int, S: int, max_query_length: int) -> RaggedBatch:
    """Of padding alone, as host arrays that the caller may fill."""

    def zeros(*shape: int) -> Any:
        return np.zeros(shape, np.int32)

    return RaggedBatch(
        tokens=zeros(T),
        positions=zeros(T),
        query_starts=zeros(S + 1),
        kv_lengths=zeros(S),
        page_table=zeros(S, config.pages_per_sequence),
        max_query_length=max_query_length,
    )


class Step:
    """One model's step over a ragged batch, compiled once a shape of it. The pages are donated, and updated in place.

    The model's parameters and `cache` may be `jax.ShapeDtypeStruct`s with shardings, to lower a step only.
    """

    def __init__(self, model: Model, config: EngineConfig, cache: tuple[KVPages, ...]) -> None:
        self._dtype = jnp.dtype(config.dtype)
        mesh = jax.tree.leaves(cache)[0].sharding.mesh
        self._mesh = mesh.abstract_mesh
        self._graph, state = nnx.split(model)
        # Flat: jax would take a State apart, in Python, for every step.
        self.params, self._params_tree = jax.tree.flatten(state)
        self._program = jax.jit(
            self._forward,
            static_argnames=("all_logits",),
            donate_argnames=("cache",),
            out_shardings=(None, NamedSharding(mesh, PartitionSpec()), jax.tree.map(lambda leaf: leaf.sharding, cache)),
        )

    def _forward(
        self, params: list[jax.Array], cache: tuple[KVPages, ...], batch: RaggedBatch, all_logits: bool = False
    ) -> tuple[jax.Array, jax.Array, tuple[KVPages, ...]]:
        model = nnx.merge(self._graph, jax.tree.unflatten(self._params_tree, params))
        with jax.sharding.use_abstract_mesh(self._mesh):  # for kernels that work on a device's own part
            hidden, cache = model(batch, cache, dtype=self._dtype)
            if not all_logits:
                hidden = hidden[jnp.maximum(batch.query_starts[1:] - 1, 0)]
            logits = model.logits(hidden)
            return logits, best_tokens(logits), cache

    def __call__(
        self, cache: tuple[KVPages, ...], batch: RaggedBatch, *, all_logits: bool = False
    ) -> tuple[jax.Array, jax.Array, tuple[KVPages, ...]]:
        """Runs it.

        Returns:
          Of every sequence's last token (with `all_logits`, for evaluation, of all T) the logits [S, V] and the best
          next token, int32 [S], which costs less here than in a call of its own; and the new pages.
        """
        logits, best, pages = self._program(self.params, cache, batch, all_logits=all_logits)
        return logits, best, pages

    @property
    def programs(self) -> int:
        """How many were compiled."""
        return self._program._cache_size()  # type: ignore[attr-defined]

    def lower(self, cache: tuple[KVPages, ...], batch: RaggedBatch) -> jax.stages.Lowered:
        """The program of a batch's shape, not run: to read it, its cost or its memory."""
        return self._program.lower(self.params, cache, batch)
