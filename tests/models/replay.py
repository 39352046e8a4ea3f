"""Runs a model over pieces of known texts and collects the logits of every token."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jetserve.cache.kv_cache import make_cache
from jetserve.checkpoint.load import load_model
from jetserve.config import CacheConfig, EngineConfig, MeshConfig
from jetserve.kernels.attention import RaggedBatch
from jetserve.parallel.mesh import make_mesh

TOKENS, SEQUENCES, PAGE, PAGES = 96, 3, 8, 12
"""Of every batch here, so that each model compiles two programs: one for any batch, one for decoding."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """Tokens [start, stop) of the text of one sequence."""

    sequence: int
    start: int
    stop: int


class Replay:
    """A model loaded from a folder onto some devices, `experts` of which share the experts; see `load_model`."""

    def __init__(
        self,
        folder: Path,
        texts: list[np.ndarray],
        *,
        devices: int = 1,
        experts: int = 1,
        **settings: Any,
    ) -> None:
        self._mesh = placed = make_mesh(MeshConfig(expert=experts), jax.devices()[:devices])
        loaded = load_model(folder, mesh=placed, dtype=jnp.float32, **settings)
        self.texts = texts
        self._graph, self._params = nnx.split(loaded.model)
        cache = CacheConfig(page_size=PAGE, num_pages=SEQUENCES * PAGES)
        config = EngineConfig(max_length=PAGE * PAGES, max_step_tokens=TOKENS, cache=cache)
        self._cache = functools.partial(make_cache, loaded.config, config, placed)
        self._tables = np.random.default_rng(0).permutation(SEQUENCES * PAGES).reshape(SEQUENCES, PAGES) + 1
        self._forward = jax.jit(self._logits)

    def _logits(self, params: nnx.State, cache: Any, batch: RaggedBatch) -> tuple[jax.Array, Any]:
        model = nnx.merge(self._graph, params)
        hidden, cache = model(batch, cache, dtype=jnp.float32)
        return model.logits(hidden), cache

    def run(self, steps: list[list[Piece]]) -> list[np.ndarray]:
        """The logits of every text, [length, V], computed in these steps from empty pages."""
        cache, out = self._cache(), [[] for _ in self.texts]
        for pieces in steps:
            decode = all(piece.stop - piece.start == 1 for piece in pieces)
            with jax.sharding.use_abstract_mesh(self._mesh.abstract_mesh):  # as `Step` does
                logits, cache = self._forward(self._params, cache, self._batch(pieces, decode))
            start = 0
            for piece in pieces:
                stop = start + piece.stop - piece.start
                out[piece.sequence].append(np.asarray(logits[start:stop]))
                start = stop
        return [np.concatenate(parts) for parts in out]

    def _batch(self, pieces: list[Piece], decode: bool) -> RaggedBatch:
        T = SEQUENCES if decode else TOKENS
        tokens, positions = np.zeros(T, np.int32), np.zeros(T, np.int32)
        starts, lengths = np.zeros(SEQUENCES + 1, np.int32), np.zeros(SEQUENCES, np.int32)
        table = np.zeros((SEQUENCES, PAGES), np.int32)
        start = 0
        for i, piece in enumerate(pieces):
            stop = start + piece.stop - piece.start
            tokens[start:stop] = self.texts[piece.sequence][piece.start : piece.stop]
            positions[start:stop] = np.arange(piece.start, piece.stop)
            starts[i + 1 :], lengths[i], table[i] = stop, piece.stop, self._tables[piece.sequence]
            start = stop
        return RaggedBatch(
            tokens=tokens,
            positions=positions,
            query_starts=starts,
            kv_lengths=lengths,
            page_table=table,
            max_query_length=1 if decode else T,
        )

    def whole(self) -> list[np.ndarray]:
        """Every text in one step of its own."""
        return self.run([[Piece(sequence=s, start=0, stop=len(text))] for s, text in enumerate(self.texts)])

    def mixed(self) -> list[np.ndarray]:
        """Prefills one text while another is in the middle, then decodes all three, the texts ending in turn."""
        first, second, third = (len(text) for text in self.texts)
        done = [first - 10, second - 9, third - 1]
        steps = [
            [Piece(sequence=0, start=0, stop=60), Piece(sequence=2, start=0, stop=1)],
            [
                Piece(sequence=2, start=1, stop=done[2]),
                Piece(sequence=0, start=60, stop=done[0]),
                Piece(sequence=1, start=0, stop=done[1]),
            ],
        ]
        while running := [s for s in range(3) if done[s] < len(self.texts[s])]:
            steps.append([Piece(sequence=s, start=done[s], stop=done[s] + 1) for s in running])
            done = [count + (s in running) for s, count in enumerate(done)]
        return self.run(steps)
