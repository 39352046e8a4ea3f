"""The sampler: next tokens from logits, each row by its own request's settings, on the device.

Nothing here sorts the vocabulary. The cut-offs of top-k and top-p are found by bisection over the bits of the float
order, 32 passes of sums over V, exact but for ties, which all stay in. Randomness depends on a request's seed and the
position alone (Gumbel-max over a counter-based key), so a request gives the same text alone or in any batch.
"""

import dataclasses
import secrets
from collections.abc import Sequence as Seq
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jetserve.engine import guided
from jetserve.engine.guided import Matcher
from jetserve.types import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, MAX_TOP_LOGPROBS, SamplingParams

MAX_END_TOKENS = 32
"""Ends of sequence that a tokenizer may have, all of which `min_tokens` bans for a while."""
BIAS_SLOTS = MAX_LOGIT_BIAS + MAX_STOP_TOKEN_IDS + MAX_END_TOKENS
GREEDY = SamplingParams(temperature=0.0)
NO_TOKEN = -1
"""In place of a token that cannot be sampled: the logits are not finite numbers, or the guide allows none."""
BANNED = -1e30
"""The logit of a token that must not be chosen: finite, so that softmax stays free of NaN."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingBatch:
    """The settings of S rows as arrays.

    `seed` uint32 [S, 2]; `position` int32 [S], tokens before the one sampled; `history` int32 [S, L], prompt and
    output padded with -1; `prompt_length` int32 [S]; `bias_ids` int32 [S, BIAS_SLOTS] padded with -1, `bias` float32 of
    its shape; `allowed` uint32 [S, ceil(V / 32)], token t by bit t % 32 of word t // 32; the rest float32 or int32 [S],
    named as in `SamplingParams`.
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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampled:
    """tokens int32 [S]; of the full sampler also logprob [S] of each, and the best alternatives' ids and logprobs."""

    tokens: jax.Array
    logprob: jax.Array | None = None
    top_ids: jax.Array | None = None
    top_logprobs: jax.Array | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """What the sampler needs of one sequence.

    `tokens` are all so far. `banned` may not come now, unless the `matcher` allows nothing else.
    """

    params: SamplingParams
    seed: int
    tokens: Seq[int]
    prompt_length: int
    banned: Seq[int] = ()
    matcher: Matcher | None = None

    @property
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
    for i, row in enumerate(rows):
        history[i, : len(row.tokens)] = row.tokens
        prompt_length[i], position[i] = row.prompt_length, len(row.tokens)
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
    )


def _checked(tokens: jax.Array, *logits: jax.Array) -> jax.Array:
    """int32 [S], with NO_TOKEN where the best of any logits is not a finite number: any NaN makes the maximum one."""
    for rows in logits:
        tokens = jnp.where(jnp.isfinite(jnp.max(rows, axis=-1)), tokens, NO_TOKEN)
    return tokens.astype(jnp.int32)


@jax.jit
def sample_greedy(logits: jax.Array) -> Sampled:
    """[S, V] -> the argmax of every row, or NO_TOKEN."""
    return Sampled(tokens=_checked(jnp.argmax(logits, axis=-1), logits))


@jax.jit
def sample(logits: jax.Array, batch: SamplingBatch) -> Sampled:
    """float32 [S, V] -> tokens by every setting, with logprobs of the model's own distribution."""
    logits = logits.astype(jnp.float32)
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    adjusted = jax.vmap(_adjust)(logits, batch)
    tokens = _checked(jax.vmap(_choose)(adjusted, batch), logits, adjusted)
    top_logprobs, top_ids = jax.lax.top_k(logprobs, min(MAX_TOP_LOGPROBS, logits.shape[-1]))
    chosen = jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
    return Sampled(tokens=tokens, logprob=chosen, top_ids=top_ids, top_logprobs=top_logprobs)


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


def _choose(logits: jax.Array, row: SamplingBatch) -> jax.Array:
    """[V] -> one token: the argmax at temperature 0, else a draw from what the cut-offs leave."""
    scaled, kept = cut_off(logits, row)
    key = jax.random.fold_in(jax.random.wrap_key_data(row.seed, impl="threefry2x32"), row.position)
    noisy = jnp.where(kept, scaled + jax.random.gumbel(key, logits.shape), -jnp.inf)
    return jnp.where(row.temperature > 0, jnp.argmax(noisy), jnp.argmax(logits)).astype(jnp.int32)


def cut_off(logits: jax.Array, row: SamplingBatch) -> tuple[jax.Array, jax.Array]:
    """[V] -> log weights [V], the best 0, and which tokens top-k, then top-p, then min-p leave of them."""
    V = logits.shape[0]
    # The best is taken off first: divided by a small temperature it would overflow.
    scaled = (logits - jnp.max(logits)) / jnp.where(row.temperature > 0, row.temperature, 1.0)
    order = _ordered_bits(scaled)
    top_k = jnp.where(row.top_k > 0, jnp.minimum(row.top_k, V), V)
    kept = order >= _threshold(order, jnp.ones(V, jnp.float32), top_k.astype(jnp.float32))
    weights = jnp.where(kept, jnp.exp(scaled), 0.0)
    top_p = _threshold(order, weights, row.top_p * jnp.sum(weights))
    kept &= jnp.where(row.top_p < 1, order >= top_p, True)
    kept &= scaled >= jnp.log(jnp.maximum(row.min_p, 1e-38))
    return scaled, kept


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
