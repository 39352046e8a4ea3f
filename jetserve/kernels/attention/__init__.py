"""Attention of a ragged batch over a paged KV cache: the operation's types.

The operation writes the batch's keys and values into the pages and attends over them, in one call, so that an
implementation can update the pages in place:

  run(q [T, N, H], k [T, K, H], v [T, K, H], pages, batch, *,
      scale, sliding_window=None, soft_cap=None, alibi_slopes=None, sinks=None) -> ([T, N, H], pages)

The score of a query at position i and a key at position j, of head n, is

  s = scale * (q . k); with a soft cap c (Gemma Team 2024, "Gemma 2"), c * tanh(s / c);
  with slopes (Press et al. 2022, "ALiBi"), plus alibi_slopes[n] * (j - i),

for j <= i, and with a sliding window w for j > i - w. With sinks, the softmax of head n has one more score, sinks[n],
whose weight goes nowhere.

Letters: T tokens of the batch, S sequences, P pages a sequence, N query heads, K KV heads, H head size.
"""

import dataclasses

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class KVPages:
    """One layer's pages. Heads stand in pairs, key then value (k0 v0 k1 v1 …), as jax's TPU kernel reads them.

    Attributes:
      values: [pages, page_size, 2K, H], float or int8. Page 0 takes the writes of padding. Places that no token of a
        sequence was written to may hold anything, NaN too, and never change its result.
      scale: float32 [pages, page_size, 2K] for int8 values (value * scale), else None.
    """

    values: jax.Array
    scale: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedBatch:
    """Tokens of several sequences, one sequence after the other, padded to fixed sizes.

    Attributes:
      tokens: int32 [T]; those from `query_starts[-1]` on are padding.
      positions: int32 [T], of each token in its sequence.
      query_starts: int32 [S + 1]; sequence s owns tokens [query_starts[s], query_starts[s + 1]).
      kv_lengths: int32 [S], tokens of the sequence once this batch is written; 0 for padding.
      page_table: int32 [S, P], the sequence's pages in order; 0 where there is none.
      max_query_length: an upper bound of the tokens that a sequence has here; 1 makes the program a decode step.
    """

    tokens: jax.Array
    positions: jax.Array
    query_starts: jax.Array
    kv_lengths: jax.Array
    page_table: jax.Array
    max_query_length: int = dataclasses.field(metadata={"static": True})
