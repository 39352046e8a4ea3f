"""The sampler: next tokens from logits, each row by its own request's settings, on the device.

Nothing here sorts the vocabulary. The cut-offs of top-k and top-p are found by bisection over the bits of the float
order, 32 passes of sums over V, exact but for ties, which all stay in. Randomness depends on a request's seed and the
position alone (one number from a counter-based key), so a request gives the same text alone or in any batch.
"""

import dataclasses
import functools
import secrets
from collections.abc import Sequence as Seq
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jetserve.engine import guided
from jetserve.engine.guided import Matcher
from jetserve.kernels import select
from jetserve.types import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, MAX_TOP_LOGPROBS, SamplingParams

MAX_END_TOKENS = 32
"""Ends of sequence that a tokenizer may have, all of which `min_tokens` bans for a while."""
BIAS_SLOTS = MAX_LOGIT_BIAS + MAX_STOP_TOKEN_IDS + MAX_END_TOKENS
GREEDY = SamplingParams(temperature=0.0)
NO_TOKEN = -1
"""In place of a token that cannot be sampled: the logits are not finite numbers, or the guide allows none."""
DRAW_BLOCK = 256
"""Tokens that are summed first when one is drawn."""
BANNED = -1e30
"""The logit of a token that must not be chosen: finite, so that softmax stays free of NaN."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingBatch:
    """The settings of S rows as arrays.

    `seed` uint32 [S, 2]; `position` int32 [S], tokens before the one sampled; `history` int32 [S, L], prompt and
    output padded with -1; `prompt_length` int32 [S]; `bias_ids` int32 [S, BIAS_SLOTS] padded with -1, `bias` float32 of
    its shape; `allowed` uint32 [S, ceil(V / 32)], token t by bit t % 32 of word t // 32; `wants_logprobs` bool [S];
    the rest float32 or int32 [S], named as in `SamplingParams`.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    repetition_penalty: jax.Array
    presence_penalty: jax.Array
    frequency_penalty: jax.Array
    seed: jax.Array
    position: jax.Array
    history: jax.Array
    prompt_length: jax.Array
    bias_ids: jax.Array
    bias: jax.Array
    allowed: jax.Array
    wants_logprobs: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampled:
    """tokens int32 [S], logprob [S] of each, and the best alternatives' ids and logprobs [S, MAX_TOP_LOGPROBS]."""

    tokens: jax.Array
    logprob: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """What the sampler needs of one sequence.

    `tokens` are all so far, and grow. `banned` may not come now, unless the `matcher` allows nothing else.
    """

    params: SamplingParams
    seed: int
    tokens: Seq[int]
    prompt_length: int
    banned: Seq[int] = ()
    matcher: Matcher | None = None

    @functools.cached_property
    def is_plain_greedy(self) -> bool:
        """Whether the argmax of the raw logits is all that is asked for."""
        p = self.params
        changed = p.repetition_penalty != 1 or p.presence_penalty or p.frequency_penalty or p.logit_bias or self.banned
        return p.temperature == 0 and p.logprobs is None and not changed and self.matcher is None


def resolve_seed(params: SamplingParams, index: int) -> int:
    """The seed of sample `index` of a request: the request's plus the index, or one drawn from the system."""
    return secrets.randbits(64) if params.seed is None else (params.seed + index) % 2**64


def make_batch(rows: Seq[Row], size: int, max_length: int, vocab_size: int) -> SamplingBatch:
    """Rows padded to `size`, as host arrays. It asks the matchers, for milliseconds: best while the device works."""
    allowed: Any = np.full((size, -(-vocab_size // 32)), 2**32 - 1, np.uint32)
    if matchers := {i: row.matcher for i, row in enumerate(rows) if row.matcher is not None}:
        guided.fill_masks(matchers, allowed)
    history: Any = np.full((size, max_length), -1, np.int32)
    prompt_length: Any = np.zeros(size, np.int32)
    position: Any = np.zeros(size, np.int32)
    seed: Any = np.zeros((size, 2), np.uint32)
    bias_ids: Any = np.full((size, BIAS_SLOTS), -1, np.int32)
    bias: Any = np.zeros((size, BIAS_SLOTS), np.float32)
    wants_logprobs: Any = np.zeros(size, bool)
    for i, row in enumerate(rows):
        history[i, : len(row.tokens)] = row.tokens
        prompt_length[i], position[i] = row.prompt_length, len(row.tokens)
        wants_logprobs[i] = row.params.logprobs is not None
        seed[i] = row.seed >> 32, row.seed & 0xFFFFFFFF
        biases = {**row.params.logit_bias, **dict.fromkeys(row.banned, BANNED)}
        bias_ids[i, : len(biases)] = list(biases.keys())
        bias[i, : len(biases)] = list(biases.values())

    def column(name: str, padding: float, dtype: type = np.float32) -> Any:
        values = [min(getattr(row.params, name), 2**31 - 1) for row in rows]
        return np.array(values + [padding] * (size - len(rows)), dtype)

    return SamplingBatch(
        temperature=column("temperature", 0),
        top_k=column("top_k", 0, np.int32),
        top_p=column("top_p", 1),
        min_p=column("min_p", 0),
        repetition_penalty=column("repetition_penalty", 1),
        presence_penalty=column("presence_penalty", 0),
        frequency_penalty=column("frequency_penalty", 0),
        seed=seed,
        position=position,
        history=history,
        prompt_length=prompt_length,
        bias_ids=bias_ids,
        bias=bias,
        allowed=allowed,
        wants_logprobs=wants_logprobs,
    )


def best_tokens(logits: jax.Array) -> jax.Array:
    """[S, V] -> int32 [S]: the token of the greatest logit, or NO_TOKEN."""
    return select.call("argmax", logits)


@jax.jit
def sample(logits: jax.Array, best: jax.Array, batch: SamplingBatch) -> Sampled:
    """Tokens by every setting, with logprobs of the model's own distribution where a row wants them.

    Takes logits [S, V] and their `best_tokens`. What no row asks for is not computed, in the one program that there is.
    """
    logits = logits.astype(jnp.float32)
    adjusted, chosen = jax.lax.cond(
        _any_adjusted(batch), _adjust_rows, lambda logits, best, _: (logits, best), logits, best, batch
    )
    is_usable = (best != NO_TOKEN) & (chosen != NO_TOKEN)
    drawn = jax.vmap(_draw)(cut_off(adjusted, batch), batch.seed, batch.position)
    tokens = jnp.where(is_usable, jnp.where(batch.temperature > 0, drawn, chosen), NO_TOKEN)
    logprob, top_ids, top_logprobs = jax.lax.cond(
        jnp.any(batch.wants_logprobs), _logprobs, _no_logprobs, logits, tokens
    )
    return Sampled(tokens=tokens, logprob=logprob, top_ids=top_ids, top_logprobs=top_logprobs)


def _logprobs(logits: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """[S] of the tokens; ids and logprobs [S, MAX_TOP_LOGPROBS] of the best."""
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    top_logprobs, top_ids = jax.lax.top_k(logprobs, min(MAX_TOP_LOGPROBS, logits.shape[-1]))
    return jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0], top_ids, top_logprobs


def _no_logprobs(logits: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    shapes = jax.eval_shape(_logprobs, logits, tokens)
    chosen, top_ids, top_logprobs = (jnp.zeros(shape.shape, shape.dtype) for shape in shapes)
    return chosen, top_ids, top_logprobs


def _any_adjusted(batch: SamplingBatch) -> jax.Array:
    """Whether `_adjust` would change any row."""
    penalties = (batch.repetition_penalty != 1) | (batch.presence_penalty != 0) | (batch.frequency_penalty != 0)
    return jnp.any(penalties) | jnp.any(batch.bias_ids >= 0) | jnp.any(~batch.allowed != 0)


def _adjust_rows(logits: jax.Array, _best: jax.Array, batch: SamplingBatch) -> tuple[jax.Array, jax.Array]:
    """[S, V] -> the same adjusted, and the best tokens then."""
    adjusted = jax.vmap(_adjust)(logits, batch)
    return adjusted, best_tokens(adjusted)


def _adjust(logits: jax.Array, row: SamplingBatch) -> jax.Array:
    """[V] -> [V]: penalties over the tokens so far, then the bias, then -inf for what the guide does not allow.

    Repetition (Keskar et al. 2019, "CTRL") counts prompt and output; presence and frequency count the output, as
    OpenAI's API defines them.
    """
    V = logits.shape[0]
    # -1 pads; V is out of range and dropped, where a negative index would wrap.
    known = jnp.where(row.history < 0, V, row.history)
    is_output = jnp.arange(known.shape[0]) >= row.prompt_length
    seen = jnp.zeros(V, bool).at[known].set(True, mode="drop")
    counts = jnp.zeros(V, jnp.float32).at[jnp.where(is_output, known, V)].add(1.0, mode="drop")
    repeated = jnp.where(logits > 0, logits / row.repetition_penalty, logits * row.repetition_penalty)
    logits = jnp.where(seen, repeated, logits)
    logits -= row.frequency_penalty * counts + row.presence_penalty * (counts > 0)
    logits = logits.at[jnp.where(row.bias_ids < 0, V, row.bias_ids)].add(row.bias, mode="drop")
    bits = row.allowed[:, None] >> jnp.arange(32, dtype=jnp.uint32) & 1
    return jnp.where(bits.reshape(-1)[:V] == 1, logits, -jnp.inf)


def _draw(weights: jax.Array, seed: jax.Array, position: jax.Array) -> jax.Array:
    """A token with probability in proportion to its weight [V]: where the running sum passes a random share of all.

    The sum runs over blocks, then within one of them.
    """
    key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
    blocks = jnp.pad(weights, (0, -weights.shape[0] % DRAW_BLOCK)).reshape(-1, DRAW_BLOCK)
    sums = jnp.sum(blocks, axis=-1)
    target = jax.random.uniform(key) * jnp.sum(sums)
    block, before = _passes(sums, target)
    token, _ = _passes(blocks[block], target - before)
    return block * DRAW_BLOCK + token


def _passes(weights: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first index whose weight takes the running sum above `target`, and the sum before it.

    Never one of weight 0; where rounding leaves none, the last that has a weight.
    """
    sums = jnp.cumsum(weights)
    passes = (sums > target) & (weights > 0)
    last = weights.shape[0] - 1 - jnp.argmax(weights[::-1] > 0)
    index = jnp.where(jnp.any(passes), jnp.argmax(passes), last)
    return index, sums[index] - weights[index]


def cut_off(logits: jax.Array, batch: SamplingBatch) -> jax.Array:
    """[S, V] -> weights [S, V] to draw by, the best 1, and 0 for what top-k, then top-p, then min-p take away."""
    # The best is taken off first: divided by a small temperature it would overflow.
    temperature = jnp.where(batch.temperature > 0, batch.temperature, 1.0)
    scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature[:, None]
    is_cut = jnp.any((batch.top_k > 0) | (batch.top_p < 1))
    lowest = jax.lax.cond(is_cut, jax.vmap(_lowest_kept), _nothing_cut, scaled, batch)
    kept = (_ordered_bits(scaled) >= lowest[:, None]) & (scaled >= jnp.log(jnp.maximum(batch.min_p, 1e-38))[:, None])
    return jnp.where(kept, jnp.exp(scaled), 0.0)


def _lowest_kept(scaled: jax.Array, row: SamplingBatch) -> jax.Array:
    """The ordered bits of the least of the log weights [V] that top-k, then top-p leave."""
    V = scaled.shape[0]
    order = _ordered_bits(scaled)
    top_k = jnp.where(row.top_k > 0, jnp.minimum(row.top_k, V), V)
    by_k = _threshold(order, jnp.ones(V, jnp.float32), top_k.astype(jnp.float32))
    weights = jnp.where(order >= by_k, jnp.exp(scaled), 0.0)
    by_p = _threshold(order, weights, row.top_p * jnp.sum(weights))
    return jnp.maximum(by_k, jnp.where(row.top_p < 1, by_p, 0))


def _nothing_cut(scaled: jax.Array, _batch: SamplingBatch) -> jax.Array:
    return jnp.zeros(scaled.shape[0], jnp.uint32)


def _ordered_bits(x: jax.Array) -> jax.Array:
    """float32 -> uint32 of the same order."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits & sign, ~bits, bits | sign)


def _threshold(order: jax.Array, weights: jax.Array, wanted: jax.Array) -> jax.Array:
    """The highest t for which the weights of `order >= t` sum to `wanted`; 0 (all) if none does."""

    def bit(i: jax.Array, t: jax.Array) -> jax.Array:
        candidate = t | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        enough = jnp.sum(jnp.where(order >= candidate, weights, 0.0)) >= wanted
        return jnp.where(enough, candidate, t)

    return jax.lax.fori_loop(0, 32, bit, jnp.uint32(0))
