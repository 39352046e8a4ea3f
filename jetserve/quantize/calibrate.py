"""Runs a model over calibration text one layer at a time, and measures what the inputs of its weights are like.

Owns the hidden states, which stay on the host between layers, and the ragged batches that they are run in. Works on any
model whose layers are `traced_once` and whose weights are met by `project`; knows nothing of files, nor of methods.

Letters: S windows of L tokens each; D embed, K contracted.
"""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jetserve.kernels import select
from jetserve.kernels.attention import KVPages, RaggedBatch
from jetserve.layers.linear import Linear, observe
from jetserve.layers.stack import replaced_by, traced_once
from jetserve.models.base import Model

STEP_TOKENS = 2048
"""Run at once; one window at least."""
PAGE_SIZE = 16

Stage = tuple[str, ...]
"""The paths within a layer of linear layers that take the same input, such as ("attention.q", "attention.k")."""


class Calibration:
    """The hidden states of all windows before one layer, and what is needed to take them through it.

    Attributes:
      layers: of the model, in order.
    """

    def __init__(self, model: Model, windows: np.ndarray) -> None:
        """Embeds the windows, int32 [S, L], with a model that has all its weights but those of the layers."""
        S, L = windows.shape
        size = next(size for size in range(min(S, max(1, STEP_TOKENS // L)), 0, -1) if S % size == 0)
        self._batches = [_batch(windows[start : start + size]) for start in range(0, S, size)]
        shape = (size * _pages(L) + 1, PAGE_SIZE, 2 * model.config.num_kv_heads, model.config.head_size)
        self._pages = KVPages(values=jnp.zeros(shape, jnp.float32))
        self.layers: list[nnx.Module] = []
        self._states = [self._embed(model, batch) for batch in self._batches]

    def _embed(self, model: Model, batch: RaggedBatch) -> np.ndarray:
        layers: list[nnx.Module] = []
        states: list[jax.Array] = []

        def skip(layer: nnx.Module, x: jax.Array, _: RaggedBatch, pages: KVPages) -> tuple[jax.Array, KVPages]:
            layers.append(layer)
            states.append(x)
            return x, pages

        with replaced_by(skip):
            model(batch, (self._pages,) * model.config.num_layers, dtype=jnp.float32)
        self.layers = layers
        return np.asarray(states[0])

    def _arguments(self) -> Iterator[tuple[jax.Array, RaggedBatch, KVPages]]:
        """Those of a layer, batch after batch."""
        for states, batch in zip(self._states, self._batches, strict=True):
            yield jnp.asarray(states), batch, self._pages

    def stages(self, layer: nnx.Module) -> list[Stage]:
        """The linear layers of a layer, in the order in which it meets them; shapes of its weights are enough."""
        found: list[Stage] = []

        def run(state: nnx.State, *args: jax.Array) -> None:
            merged = nnx.merge(graph, state)
            names = {id(module): path for path, module in linears(merged).items()}
            found.extend(tuple(names[id(module)] for module in met) for _, met in _inputs(merged, *args))

        graph, state = nnx.split(layer)
        jax.eval_shape(run, state, *next(self._arguments()))
        return found

    def second_moment(self, layer: nnx.Module, stage: int) -> jax.Array:
        """The mean over all tokens of x x^T, x the input of the linear layers of a stage: float32 [K, K]."""
        graph, state = nnx.split(layer)
        total, tokens = None, 0
        for args in self._arguments():
            part = _second_moment(graph, select.selection(), stage, state, args)
            total = part if total is None else total + part
            tokens += args[0].shape[0]
        assert total is not None
        return total / tokens

    def advance(self, layer: nnx.Module) -> None:
        """Takes the hidden states through a layer, with the weights that it has now."""
        for i, args in enumerate(self._arguments()):
            self._states[i] = np.asarray(traced_once(layer, *args)[0])


def linears(layer: nnx.Module) -> dict[str, Linear]:
    """The linear layers within a layer, by their dotted paths."""
    return {".".join(map(str, path)): module for path, module in nnx.iter_modules(layer) if isinstance(module, Linear)}


def _inputs(layer: nnx.Module, *args: jax.Array) -> list[tuple[jax.Array, tuple[Linear, ...]]]:
    """What linear layers meet, in order, as a layer is traced."""
    found: list[tuple[jax.Array, tuple[Linear, ...]]] = []
    with observe(lambda x, met: found.append((x, met))):
        layer(*args)
    return found


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _second_moment(
    graph: nnx.GraphDef, selection: select.Selection, stage: int, state: nnx.State, args: tuple
) -> jax.Array:
    """The sum over the batch's tokens. What the layer computes after the stage is not compiled."""
    x = _inputs(nnx.merge(graph, state), *args)[stage][0]
    x = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    return jnp.matmul(x.T, x, precision=jax.lax.Precision.HIGHEST)


def _pages(length: int) -> int:
    return -(-length // PAGE_SIZE)


def _batch(windows: np.ndarray) -> RaggedBatch:
    S, L = windows.shape
    return RaggedBatch(
        tokens=jnp.asarray(windows.reshape(-1), jnp.int32),
        positions=jnp.tile(jnp.arange(L, dtype=jnp.int32), S),
        query_starts=jnp.arange(S + 1, dtype=jnp.int32) * L,
        kv_lengths=jnp.full(S, L, jnp.int32),
        page_table=1 + jnp.arange(S * _pages(L), dtype=jnp.int32).reshape(S, -1),
        max_query_length=L,
    )
