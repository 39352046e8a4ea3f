"""The reference: gathers, and einsums with an online softmax over chunks of the cache, for every platform.

Queries are cut into blocks of one sequence each. A loop over chunks of KV positions keeps a running softmax (Milakov
and Gimelshein 2018, "Online normalizer calculation for softmax"), so memory does not grow with the length and time
follows the longest sequence that is there, not the longest allowed.
"""

import jax
import jax.numpy as jnp

from jetserve.kernels.attention import KVPages, RaggedBatch

PLATFORMS = None
PRIORITY = 0

QUERY_BLOCK = 64
"""Query tokens a block."""
KV_CHUNK = 256
"""KV positions a turn of the loop."""
MASKED = -1e30
"""Finite, so that rows with every position masked stay free of NaN."""


def run(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pages: KVPages,
    batch: RaggedBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: jax.Array | None = None,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, KVPages]:
    """See the package."""
    pages = write(k, v, pages, batch)
    return _attend(q, pages, batch, scale, sliding_window, soft_cap, alibi_slopes, sinks), pages


def write(k: jax.Array, v: jax.Array, pages: KVPages, batch: RaggedBatch) -> KVPages:
    """Puts k and v [T, K, H] where the page table says."""
    T, K, H = k.shape
    S, P = batch.page_table.shape
    page_size = pages.values.shape[1]
    sequence = _sequence_of(jnp.arange(T), batch.query_starts)
    index = batch.page_table[jnp.minimum(sequence, S - 1), jnp.minimum(batch.positions // page_size, P - 1)]
    index = jnp.where(sequence < S, index, 0)
    offset = batch.positions % page_size
    kv = jnp.stack([k, v], axis=2).reshape(T, 2 * K, H)
    if pages.scale is None:
        return KVPages(values=pages.values.at[index, offset].set(kv.astype(pages.values.dtype)))
    kv = kv.astype(jnp.float32)
    range_ = jnp.max(jnp.abs(kv), axis=-1)
    scale = jnp.where(range_ == 0, 1.0, range_ / 127)
    values = jnp.round(kv / scale[..., None]).astype(jnp.int8)
    return KVPages(values=pages.values.at[index, offset].set(values), scale=pages.scale.at[index, offset].set(scale))


def _sequence_of(index: jax.Array, starts: jax.Array) -> jax.Array:
    """Which sequence owns each index, for starts [S + 1]; S for those past the end."""
    return jnp.searchsorted(starts[1:], index, side="right", method="compare_all")


def _attend(
    q: jax.Array,
    pages: KVPages,
    batch: RaggedBatch,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    alibi_slopes: jax.Array | None,
    sinks: jax.Array | None,
) -> jax.Array:
    T, N, H = q.shape
    S = batch.page_table.shape[0]
    K = pages.values.shape[2] // 2
    starts = batch.query_starts
    block = min(QUERY_BLOCK, batch.max_query_length)
    B = S if block == 1 else T // block + S  # blocks: every sequence may waste one

    blocks_of = -(-(starts[1:] - starts[:-1]) // block)
    block_starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(blocks_of)])
    owner = jnp.minimum(_sequence_of(jnp.arange(B), block_starts), S - 1)
    first = starts[owner] + (jnp.arange(B) - block_starts[owner]) * block
    rows = jnp.clip(first[:, None] + jnp.arange(block), 0, T - 1)  # [B, block], past the end: discarded below

    out = _attend_blocks(
        q[rows].reshape(B, block, K, N // K, H).astype(jnp.float32) * scale,
        batch.positions[rows],
        batch.page_table[owner],
        batch.kv_lengths[owner],
        pages,
        sliding_window,
        soft_cap,
        None if alibi_slopes is None else alibi_slopes.reshape(K, N // K),
        None if sinks is None else sinks.reshape(K, N // K),
    )
    sequence = jnp.minimum(_sequence_of(jnp.arange(T), starts), S - 1)
    within = jnp.arange(T) - starts[sequence]
    return out[jnp.clip(block_starts[sequence] + within // block, 0, B - 1), within % block].astype(q.dtype)


def _attend_blocks(
    q: jax.Array,
    positions: jax.Array,
    page_table: jax.Array,
    kv_lengths: jax.Array,
    pages: KVPages,
    sliding_window: int | None,
    soft_cap: float | None,
    slopes: jax.Array | None,
    sinks: jax.Array | None,
) -> jax.Array:
    """q [B, Q, K, R, H] (R = N / K), positions [B, Q], page_table [B, P], kv_lengths [B], slopes and sinks [K, R]
    -> [B, Q, N, H].
    """
    B, Q, K, R, H = q.shape
    page_size = pages.values.shape[1]
    chunk_pages = min(max(1, KV_CHUNK // page_size), page_table.shape[1])
    C = chunk_pages * page_size
    page_table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % chunk_pages)))

    def turn(c: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        highest, total, out = state  # [B, K, R, Q], the same, [B, K, R, Q, H]
        index = jax.lax.dynamic_slice_in_dim(page_table, c * chunk_pages, chunk_pages, axis=1)
        kv = pages.values[index].reshape(B, C, K, 2, H).astype(jnp.float32)
        kv_positions = c * C + jnp.arange(C)
        # What lies past the end was left there by another sequence, and may be NaN, which no weight of 0 takes away.
        present = kv_positions < kv_lengths[:, None]  # [B, C]
        values = jnp.where(present[:, :, None, None], kv[:, :, :, 1], 0.0)
        scores = jnp.einsum("bqkrh,bckh->bkrqc", q, kv[:, :, :, 0])
        if pages.scale is not None:
            kv_scale = pages.scale[index].reshape(B, C, K, 2).transpose(3, 0, 2, 1)[:, :, :, None, None]
            scores *= kv_scale[0]  # [B, K, 1, 1, C]
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        if slopes is not None:
            distance = kv_positions - positions[..., None]  # [B, Q, C], 0 or less where seen
            scores += slopes[:, :, None, None] * distance[:, None, None]
        seen = kv_positions <= positions[..., None]  # [B, Q, C]
        if sliding_window is not None:
            seen &= kv_positions > positions[..., None] - sliding_window
        scores = jnp.where(seen[:, None, None], scores, MASKED)
        new_highest = jnp.maximum(highest, jnp.max(scores, axis=-1))
        weights = jnp.where(seen[:, None, None], jnp.exp(scores - new_highest[..., None]), 0.0)
        shrink = jnp.exp(highest - new_highest)
        total = total * shrink + jnp.sum(weights, axis=-1)
        if pages.scale is not None:
            weights *= jnp.where(present[:, None, None, None], kv_scale[1], 0.0)
        out = out * shrink[..., None] + jnp.einsum("bkrqc,bckh->bkrqh", weights, values)
        return new_highest, total, out

    start, weight = (MASKED, 0.0) if sinks is None else (sinks[:, :, None], 1.0)
    state = (
        jnp.broadcast_to(jnp.asarray(start, jnp.float32), (B, K, R, Q)),
        jnp.full((B, K, R, Q), weight, jnp.float32),
        jnp.zeros((B, K, R, Q, H), jnp.float32),
    )
    turns = (jnp.max(kv_lengths) + C - 1) // C
    _, total, out = jax.lax.fori_loop(0, turns, turn, state)
    out = out / jnp.maximum(total, 1e-30)[..., None]
    return out.transpose(0, 3, 1, 2, 4).reshape(B, Q, K * R, H)
