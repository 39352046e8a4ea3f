"""Runs a model over calibration text one layer at a time, and measures what the inputs of its weights are like.

Owns the hidden states, which stay on the host between layers, and the ragged batches that they are run in. Works on any
model whose layers are `traced_once` and whose weights are met by `project`; knows nothing of files, nor of methods.

Letters: S windows of L tokens each; D embed, K contracted.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jetserve.kernels import select
from jetserve.kernels.attention import KVPages, RaggedBatch
from jetserve.layers.linear import Linear, observe, project
from jetserve.layers.moe import Experts
from jetserve.layers.stack import replaced_by
from jetserve.models.base import Model

STEP_TOKENS = 2048
"""Run at once; one window at least."""
PAGE_SIZE = 16
KEPT_BYTES = 4 * 2**30
"""Of the host, for what the linear layers of one layer make of all windows; without that room it is computed again for
every stage, which takes twice as long."""

GRAM_BLOCK = 256
"""Inputs a block of their second moment, which is symmetric."""

Stage = tuple[str, ...]
"""The paths within a layer of linear layers that take the same input, such as ("attention.q", "attention.k")."""
Statistic = Callable[[jax.Array], jax.Array]
"""Of rows [T, K]; rows of zeros change nothing."""
Outputs = tuple[jax.Array | np.ndarray, ...]
"""What the linear layers of a stage make of a batch."""


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
        self._has_room = False
        self._kept: list[tuple[Outputs, ...]] = [() for _ in self._batches]
        """Of each batch, by stages from the first."""

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

        def run(state: nnx.State, *args: jax.Array) -> list[Outputs]:
            merged = nnx.merge(graph, state)
            names = {id(module): path for path, module in linears(merged).items()}
            meetings = _meetings(merged, args, ())[1]
            found.extend(tuple(names[id(module)] for module in meeting.layers) for meeting in meetings)
            return [meeting.outputs for meeting in meetings]

        graph, state = nnx.split(layer)
        outputs = jax.eval_shape(run, state, *next(self._arguments()))
        size = sum(y.size * y.dtype.itemsize for y in jax.tree.leaves(outputs))
        self._has_room = size * len(self._batches) <= KEPT_BYTES
        return found

    def second_moment(self, layer: nnx.Module, stage: int) -> jax.Array:
        """The mean over all tokens of x x^T, x the input of the linear layers of a stage: float32 [K, K].

        Of experts it is [E, K, K], each one's sum over the tokens that were sent to it.
        To be asked for by rising stages, each when the weights of those before it are what they are to stay.
        """
        tokens = sum(states.shape[0] for states in self._states)
        return functools.reduce(jnp.add, self._measured(layer, stage, _gram)) / tokens

    def largest(self, layer: nnx.Module, stage: int) -> jax.Array:
        """The largest absolute value of each input of the linear layers of a stage, float32 [K]; of experts [E, K].

        To be asked for as `second_moment` is.
        """
        return functools.reduce(jnp.maximum, self._measured(layer, stage, _largest))

    def _measured(self, layer: nnx.Module, stage: int, statistic: Statistic) -> Iterator[jax.Array]:
        """A statistic of the inputs of a stage, batch after batch."""
        graph, state = nnx.split(layer)
        for i, args in enumerate(self._arguments()):
            part, outputs = _statistic(graph, select.selection(), stage, statistic, state, args, self._kept[i])
            if self._has_room:
                self._kept[i] += tuple(jax.tree.map(np.asarray, outputs))
            yield part

    def begin_again(self) -> None:
        """Before the first stage, with other weights than those that a layer's stages were run with."""
        self._kept = [() for _ in self._batches]

    def advance(self, layer: nnx.Module) -> None:
        """Takes the hidden states through a layer, with the weights that it has now."""
        graph, state = nnx.split(layer)
        for i, args in enumerate(self._arguments()):
            self._states[i] = np.asarray(_run(graph, select.selection(), state, args, self._kept[i]))
            self._kept[i] = ()


def linears(layer: nnx.Module) -> dict[str, Linear]:
    """The linear layers within a layer, by their dotted paths."""
    return {".".join(map(str, path)): module for path, module in nnx.iter_modules(layer) if isinstance(module, Linear)}


@dataclasses.dataclass(frozen=True)
class _Meeting:
    """One call of `project`, or of `Experts` whose rows are sorted by expert in groups of some sizes."""

    x: jax.Array
    layers: tuple[Linear, ...]
    group_sizes: jax.Array | None
    outputs: Outputs


def _meetings(layer: nnx.Module, args: tuple, kept: tuple[Outputs, ...]) -> tuple[jax.Array, list[_Meeting]]:
    """What a layer returns, and its calls of `project` in order; outputs that were kept are not computed."""
    found: list[_Meeting] = []

    def meet(x: jax.Array, layers: tuple[Linear, ...], group_sizes: jax.Array | None) -> list[jax.Array]:
        outputs = kept[len(found)] if len(found) < len(kept) else None
        if outputs is None:
            with observe(None):
                outputs = tuple(
                    project(x, *layers)
                    if group_sizes is None
                    else [layer(x, group_sizes) for layer in layers if isinstance(layer, Experts)]
                )
        found.append(_Meeting(x, layers, group_sizes, outputs))
        return [jnp.asarray(y) for y in outputs]

    with observe(meet):
        return layer(*args)[0], found


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _statistic(
    graph: nnx.GraphDef,
    selection: select.Selection,
    stage: int,
    statistic: Statistic,
    state: nnx.State,
    args: tuple,
    kept: tuple[Outputs, ...],
) -> tuple[jax.Array, list[Outputs]]:
    """The statistic of the batch's tokens, and the outputs of all stages before that were not kept.

    What the layer computes after the stage is not compiled.
    """
    meetings = _meetings(nnx.merge(graph, state), args, kept)[1]
    rows = meetings[stage].x.reshape(-1, meetings[stage].x.shape[-1]).astype(jnp.float32)
    sizes = meetings[stage].group_sizes
    found = statistic(rows) if sizes is None else _by_expert(statistic, rows, sizes)
    return found, [m.outputs for m in meetings[len(kept) : stage]]


def _by_expert(statistic: Statistic, x: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """[E, ...] of rows that are sorted by expert; the rows of others are zeros."""
    expert = jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(x.shape[0]), side="right")
    return jax.lax.map(lambda e: statistic(jnp.where(expert[:, None] == e, x, 0.0)), jnp.arange(group_sizes.size))


def _largest(x: jax.Array) -> jax.Array:
    """[T, K] -> [K]."""
    return jnp.max(jnp.abs(x), axis=0)


def _gram(x: jax.Array) -> jax.Array:
    """x^T x of [T, K], from the blocks on and above its diagonal."""
    parts = jnp.array_split(x, max(1, x.shape[1] // GRAM_BLOCK), axis=1)
    blocks = {
        (i, j): jnp.matmul(parts[i].T, parts[j], precision=jax.lax.Precision.HIGHEST)
        for i in range(len(parts))
        for j in range(i, len(parts))
    }
    return jnp.block(
        [[blocks[i, j] if i <= j else blocks[j, i].T for j in range(len(parts))] for i in range(len(parts))]
    )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run(
    graph: nnx.GraphDef, selection: select.Selection, state: nnx.State, args: tuple, kept: tuple[Outputs, ...]
) -> jax.Array:
    return _meetings(nnx.merge(graph, state), args, kept)[0]


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
