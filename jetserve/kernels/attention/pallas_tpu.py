"""For TPUs, steps that decode: one kernel that reads every page once, for all heads together.

Keys and values stand row by row in a page, those of all heads at a position side by side. The queries of all heads are
multiplied with all keys at once, and what is not of a query's own head is masked: the matrix unit does that in less
time than the keys take to come from memory, and picking every head's rows apart would take longer. While a chunk of
pages is multiplied the next one is on its way, be it the next sequence's.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jetserve.kernels.attention import KVPages, RaggedBatch
from jetserve.kernels.attention.heads import on_own_heads
from jetserve.kernels.attention.xla import MASKED, write

PLATFORMS = frozenset({"tpu"})
PRIORITY = 30

DTYPES = frozenset(jnp.dtype(dtype) for dtype in (jnp.float32, jnp.bfloat16, jnp.int8))
"""Of pages."""
LANES = 128
KV_ROWS = 4096
"""Rows of keys and values a turn, at most."""
MOST_PAGES = 32
"""Pages a turn, at most: each is a copy of its own."""
MOST_TABLE_ENTRIES = 2**17
"""Of all sequences: half of the scalar memory of a mebibyte."""
VMEM_BYTES = 48 * 2**20
"""That the kernel may use; devices have 64 MiB or more."""


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
    T, H = q.shape[0], q.shape[-1]
    if batch.max_query_length > 1 or batch.page_table.shape[0] != T:
        raise NotImplementedError("the step does not only decode")
    if sinks is not None:
        raise NotImplementedError("attention with sinks")
    if pages.values.dtype not in DTYPES:
        raise NotImplementedError(f"pages of {pages.values.dtype}")
    if H % LANES:
        raise NotImplementedError(f"head size {H} is not a multiple of {LANES}")
    if batch.page_table.size > MOST_TABLE_ENTRIES:
        raise NotImplementedError(f"a page table of {batch.page_table.size} entries does not fit the scalar memory")
    pages = write(k, v, pages, batch)
    slopes = None if alibi_slopes is None else alibi_slopes.astype(jnp.float32)

    def attend(q: jax.Array, pages: KVPages, slopes: jax.Array | None, *sequences: jax.Array) -> jax.Array:
        return _attend(q, pages, slopes, *sequences, window=sliding_window, cap=soft_cap)

    q = (q.astype(jnp.float32) * scale).astype(q.dtype)
    return on_own_heads(attend, q, pages, slopes, batch.page_table, batch.kv_lengths), pages


def _attend(
    q: jax.Array,
    pages: KVPages,
    slopes: jax.Array | None,
    page_table: jax.Array,
    kv_lengths: jax.Array,
    *,
    window: int | None,
    cap: float | None,
) -> jax.Array:
    """q [S, N, H], the last token of every sequence; slopes [N] -> [S, N, H]."""
    S, N, H = q.shape
    count, page_size, J, _ = pages.values.shape  # J: rows of a position, two for every KV head
    chunk = min(max(1, KV_ROWS // (page_size * J)), MOST_PAGES, page_table.shape[1])  # pages a turn
    page_table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % chunk)))
    values = pages.values.reshape(count, page_size * J, H)
    rows = chunk * page_size * J
    full_length = page_table.size * page_size * J * H * values.dtype.itemsize  # bytes
    # What a query is multiplied with: keys that were picked apart from values, or, of integers, all rows as they are.
    row = jnp.arange(0, rows, 1 if pages.scale is not None else 2)
    own = (row % 2 == 0) & (jnp.arange(N)[:, None] // (N // (J // 2)) == row % J // 2)
    arrays = [q, jnp.where(own, 0.0, MASKED), (row // J)[None], values]
    memory = pl.BlockSpec(memory_space=pl.ANY)
    whole = pl.BlockSpec(memory_space=pltpu.VMEM)
    of_sequence = pl.BlockSpec((1, N, H), lambda s, *_: (s, 0, 0))
    specs, scratch = [of_sequence, whole, whole, memory], [pltpu.VMEM((2, rows, H), values.dtype)]
    if pages.scale is not None:
        # They are few: gathered ahead, to lie side by side as scores do.
        arrays.append(pages.scale[page_table].reshape(S, -1, 1, rows))
        specs.append(memory)
        scratch.append(pltpu.VMEM((2, 1, rows), jnp.float32))
    if slopes is not None:
        arrays.append(slopes[:, None])
        specs.append(whole)
    return pl.pallas_call(
        functools.partial(
            _kernel,
            page_size=page_size,
            window=window,
            cap=cap,
            has_scale=pages.scale is not None,
            has_slopes=slopes is not None,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(S,),
            in_specs=specs,
            out_specs=of_sequence,
            scratch_shapes=[*scratch, pltpu.SMEM((1,), jnp.int32), pltpu.SemaphoreType.DMA((2,))],
        ),
        out_shape=jax.ShapeDtypeStruct((S, N, H), q.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM_BYTES),
        metadata={"hbm_bytes": str(full_length)},  # for who plans
        name="decode_attention",
    )(page_table, kv_lengths, *arrays)


def _kernel(
    table_ref: Any,
    lengths_ref: Any,
    q_ref: Any,
    other_heads_ref: Any,
    position_ref: Any,
    pages_ref: Any,
    *refs: Any,
    page_size: int,
    window: int | None,
    cap: float | None,
    has_scale: bool,
    has_slopes: bool,
) -> None:
    """One sequence: q [1, N, H]; `other_heads` [N, R] is MASKED where a row is no key of a query's head; `position`
    [1, R] of each row in its chunk. `slot_ref` holds the buffer in which the sequence's first chunk arrives.
    """
    rest = list(refs)
    scale_ref: Any = rest.pop(0) if has_scale else None
    slope_ref: Any = rest.pop(0) if has_slopes else None
    out_ref, buffer = rest.pop(0), rest.pop(0)
    scale_buffer: Any = rest.pop(0) if has_scale else None
    slot_ref, semaphores = rest
    s, sequences = pl.program_id(0), pl.num_programs(0)
    page_rows = pages_ref.shape[1]
    J, chunk = page_rows // page_size, buffer.shape[1] // page_rows
    step = chunk * page_size  # positions of a turn
    q = q_ref[0]

    def turns_of(s: Any) -> tuple[Any, Any]:
        """First and last + 1; at least one, so that every sequence has something to wait for."""
        last = jnp.maximum(pl.cdiv(lengths_ref[s], step), 1)
        return (0 if window is None else jnp.maximum(lengths_ref[s] - window, 0) // step), last

    def copies(s: Any, c: Any, slot: Any) -> list[Any]:
        found = [
            pltpu.make_async_copy(
                pages_ref.at[table_ref[s, c * chunk + i]],
                buffer.at[slot, pl.ds(i * page_rows, page_rows)],
                semaphores.at[slot],
            )
            for i in range(chunk)
        ]
        if has_scale:
            found.append(pltpu.make_async_copy(scale_ref.at[s, c], scale_buffer.at[slot], semaphores.at[slot]))
        return found

    def start(s: Any, c: Any, slot: Any) -> None:
        for copy in copies(s, c, slot):
            copy.start()

    first, last = turns_of(s)

    @pl.when(s == 0)
    def _begin() -> None:
        slot_ref[0] = 0
        start(0, first, 0)

    first_slot = slot_ref[0]

    def turn(c: Any, state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        highest, total, out = state
        slot = (first_slot + c - first) % 2

        @pl.when(c + 1 < last)
        def _next_chunk() -> None:
            start(s, c + 1, 1 - slot)

        @pl.when((c + 1 == last) & (s + 1 < sequences))
        def _next_sequence() -> None:
            slot_ref[0] = 1 - slot
            start(s + 1, turns_of(s + 1)[0], 1 - slot)

        for copy in copies(s, c, slot):
            copy.wait()
        present = lengths_ref[s] - c * step
        if not has_scale:  # integers are never NaN, which no weight of 0 takes away

            @pl.when(c + 1 == last)
            def _drop_what_others_left() -> None:
                block = buffer[slot]
                row = jax.lax.broadcasted_iota(jnp.int32, block.shape, 0)
                buffer[slot] = jnp.where(row < present * J, block, jnp.zeros_like(block))

        k, v = _keys_and_values(buffer, slot, q.dtype)
        precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
        scores = jax.lax.dot_general(
            q, k, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
        )
        position = position_ref[...]
        seen = position < present
        if window is not None:
            seen &= position >= present - window
        if has_scale:
            row_scale = jnp.where(seen, scale_buffer[slot], 0.0)
            scores *= row_scale
        if cap is not None:
            scores = cap * jnp.tanh(scores / cap)
        if has_slopes:
            scores += slope_ref[...] * (position - (present - 1)).astype(jnp.float32)
        scores += other_heads_ref[...] + jnp.where(seen, 0.0, MASKED)
        new_highest = jnp.maximum(highest, jnp.max(scores, axis=1, keepdims=True))
        weights = jnp.exp(scores - new_highest)
        shrink = jnp.exp(highest - new_highest)
        total = total * shrink + jnp.sum(weights, axis=1, keepdims=True)
        if has_scale:
            weights = pltpu.roll(weights, 1, axis=1) * row_scale  # from a key's row to its value's
        out = out * shrink + jnp.dot(
            weights.astype(v.dtype), v, precision=precision, preferred_element_type=jnp.float32
        )
        return new_highest, total, out

    N, H = q.shape
    state = jnp.full((N, 1), 2 * MASKED, jnp.float32), jnp.zeros((N, 1), jnp.float32), jnp.zeros((N, H), jnp.float32)
    _, total, out = jax.lax.fori_loop(first, last, turn, state)
    out_ref[0] = (out / total).astype(out_ref.dtype)


def _keys_and_values(buffer: Any, slot: Any, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Of rows [2R, H] that hold a key and a value in turn: [R, H] of each; of integers all rows, [2R, H], for both."""
    if jnp.issubdtype(buffer.dtype, jnp.integer):
        rows = buffer[slot].astype(dtype)
        return rows, rows
    if buffer.dtype == jnp.float32:
        half = buffer.shape[1] // 2
        return buffer[slot, pl.ds(0, half, 2)], buffer[slot, pl.ds(1, half, 2)]
    # A bfloat16 is the upper half of a float32, and two of them in turn lie in one word.
    words = pltpu.bitcast(buffer[slot], jnp.uint32)
    halves = words << 16, words & jnp.uint32(0xFFFF0000)
    k, v = (pltpu.bitcast(half, jnp.float32).astype(dtype) for half in halves)
    return k, v
