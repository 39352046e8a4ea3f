"""Perplexity of a text, and how far a model is from a reference: the numbers that say what quantization cost.

Owns windows, the losses on the device and their sums. The text is read as Hugging Face's evaluations read it: tokenized
whole, no special tokens added, cut into windows that do not overlap; in each, every token but the first is predicted
from those before it. What is left after the last whole window is dropped; a text shorter than one window is one window.
"""

import dataclasses
import logging
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tqdm

from jetserve.checkpoint import detect, hub
from jetserve.checkpoint.load import LoadedModel
from jetserve.config import EngineConfig, ModelSource, OfflineConfig
from jetserve.engine import build
from jetserve.engine.runner import Runner
from jetserve.parallel.mesh import make_mesh
from jetserve.quantize.recipe import NONE
from jetserve.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Losses:
    """Of every prediction, in the order of the text, each float32 [predictions].

    `nll`: negative log likelihood of the true token, in nats. Against a reference also `reference_nll`;
    `kl_divergence`, KL(reference || model) in nats; `agreement`, 1 where both find the same token likeliest, else 0.
    """

    nll: np.ndarray
    reference_nll: np.ndarray | None = None
    kl_divergence: np.ndarray | None = None
    agreement: np.ndarray | None = None

    def summary(self) -> dict[str, float | int | None]:
        """The numbers for JSON; sums are in float64.

        `standard_error` is that of the perplexity, from the spread of the losses (None for a single prediction).
        """
        count = self.nll.size
        perplexity = _perplexity(self.nll)
        spread = float(np.std(self.nll, ddof=1, dtype=np.float64)) if count > 1 else None
        found: dict[str, float | int | None] = {
            "perplexity": perplexity,
            "standard_error": None if spread is None else perplexity * spread / math.sqrt(count),
            "predictions": count,
        }
        if self.reference_nll is not None and self.kl_divergence is not None and self.agreement is not None:
            found |= {
                "kl_divergence": float(np.mean(self.kl_divergence, dtype=np.float64)),
                "kl_divergence_p99": float(np.quantile(self.kl_divergence.astype(np.float64), 0.99)),
                "top1_agreement": float(np.mean(self.agreement, dtype=np.float64)),
                "reference_perplexity": _perplexity(self.reference_nll),
            }
        return found


def _perplexity(nll: np.ndarray) -> float:
    mean = float(np.mean(nll, dtype=np.float64))
    if mean > 700:
        raise ValueError(f"the mean loss is {mean:.0f} nats a token: the model is not one of this text's tokenizer")
    return math.exp(mean)


@jax.jit
def _nll(logits: jax.Array, targets: jax.Array) -> dict[str, jax.Array]:
    """[T, V], [T] -> {"nll": [T]}."""
    return {"nll": _true_nll(jax.nn.log_softmax(logits.astype(jnp.float32)), targets)}


@jax.jit
def _compare(logits: jax.Array, reference: jax.Array, targets: jax.Array) -> dict[str, jax.Array]:
    """[T, V], [T, V], [T] -> every field of `Losses`, [T]."""
    log_q = jax.nn.log_softmax(logits.astype(jnp.float32))
    log_p = jax.nn.log_softmax(reference.astype(jnp.float32))
    p = jnp.exp(log_p)
    return {
        "nll": _true_nll(log_q, targets),
        "reference_nll": _true_nll(log_p, targets),
        "kl_divergence": jnp.sum(jnp.where(p > 0, p * (log_p - log_q), 0.0), axis=-1),
        "agreement": (jnp.argmax(log_p, axis=-1) == jnp.argmax(log_q, axis=-1)).astype(jnp.float32),
    }


def _true_nll(logprobs: jax.Array, targets: jax.Array) -> jax.Array:
    return -jnp.take_along_axis(logprobs, targets[:, None], axis=-1)[:, 0]


def measure(runner: Runner, windows: Sequence[Sequence[int]], *, reference: Runner | None = None) -> Losses:
    """The losses of every prediction in `windows`, each of at least two tokens.

    One chunk of logits a model is in memory at a time. Both runners take chunks of the same size.

    Raises:
      ValueError: if logits are NaN or infinite, or a window is longer than a runner's cache.
    """
    parts: dict[str, list[np.ndarray]] = {}
    progress = tqdm.tqdm(windows, desc="perplexity", unit="window", mininterval=1)
    for number, window in enumerate(progress):
        for losses in _window_losses(runner, window, reference):
            for name, values in losses.items():
                if not np.isfinite(values).all():
                    raise ValueError(
                        f"{name} is NaN or infinite in window {number + 1} of {len(windows)}: the logits overflow;"
                        " expected finite numbers. Try --dtype=float32, or check the checkpoint"
                    )
                parts.setdefault(name, []).append(values)
    return Losses(**{name: np.concatenate(values) for name, values in parts.items()})


def _window_losses(runner: Runner, window: Sequence[int], reference: Runner | None) -> Iterator[dict[str, np.ndarray]]:
    """Chunk by chunk, the losses of a window's predictions."""
    references = None if reference is None else reference.evaluate(window)
    start = 0
    for count, logits in runner.evaluate(window):
        targets = np.zeros(len(logits), np.int32)
        true = window[start + 1 : start + count + 1]
        targets[: len(true)] = true
        losses = _nll(logits, targets) if references is None else _compare(logits, next(references)[1], targets)
        yield {name: values[: len(true)] for name, values in jax.device_get(losses).items()}
        start += count


def run(
    config: OfflineConfig, source: ModelSource, engine_config: EngineConfig, *, max_length: int | None
) -> dict[str, Any]:
    """Evaluates a text file.

    Args:
      config: `text_file`, `window`, `reference_checkpoint`; of `sampling`, `max_tokens`: how many tokens are read.
      source: the model. The reference is loaded in floating point, or as it is if it is a converted checkpoint.
      engine_config: its dtype, mesh, KV quantization and step size; the cache is one window.
      max_length: tokens that a sequence may have, or None; a window must fit.

    Returns:
      For JSON: task, perplexity, standard_error, tokens (in the windows), predictions, window, windows, and the model's
      name, quantization and size; seconds and tokens_per_second of the evaluation, compilation included. With a
      reference, kl_divergence and kl_divergence_p99 in nats, top1_agreement, reference_perplexity.

    Raises:
      ValueError: for a text or a window that cannot be evaluated, and models that cannot be compared.
      OSError: if the file cannot be read.
    """
    if config.text_file is None:
        raise ValueError("--text_file is not set; --task=perplexity takes the text to evaluate")
    text = read_text(config.text_file)
    if config.window < 2:
        raise ValueError(f"--window is {config.window}; expected at least 2: the first token of a window is given")
    if max_length is not None and config.window > max_length:
        raise ValueError(f"--window is {config.window}, but --max_cache_length is {max_length}; make one fit the other")
    build.use_cache_dir(source.cache_dir)
    loaded = build.load_source(source, engine_config, progress=loading("model"))
    tokenizer = build.tokenizer_of(loaded)
    windows = cut(encode(tokenizer, text), config.window, config.sampling.max_tokens, str(config.text_file))
    runner = make_runner(loaded, engine_config, config.window)
    reference = None
    if config.reference_checkpoint is not None:
        reference = load_reference(config.reference_checkpoint, source.cache_dir, engine_config)
        check_comparable(config.reference_checkpoint, reference, loaded, text)
    start = time.perf_counter()
    other = None if reference is None else make_runner(reference, engine_config, config.window)
    summary = measure(runner, windows, reference=other).summary()
    seconds = time.perf_counter() - start
    tokens = sum(map(len, windows))
    result: dict[str, Any] = {
        "task": "perplexity",
        "perplexity": summary.pop("perplexity"),
        "standard_error": summary.pop("standard_error"),
        "tokens": tokens,
        **summary,
        "window": config.window,
        "windows": len(windows),
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "model": build.model_name(source),
        "quantize_type": loaded.quantize_type,
        "bits_per_weight": loaded.report.bits_per_weight,
        "quantize_kv_cache": engine_config.cache.quantize,
    }
    if reference is not None:
        result["reference"] = config.reference_checkpoint
        result["reference_quantize_type"] = reference.quantize_type
    return result


def loading(what: str) -> Any:
    """A progress bar of what is loaded, for `build.load_source`."""

    def progress(work: Sequence[Any]) -> Any:
        return tqdm.tqdm(work, desc=f"loading the {what}", unit="tensor", mininterval=1)

    return progress


def read_text(path: Path) -> str:
    """The text of a file. Raises OSError if it cannot be read, ValueError if it is empty or not UTF-8."""
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise FileNotFoundError(f"--text_file {path} does not exist") from None
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8: byte {error.object[error.start]:#04x} at offset {error.start}; save it as UTF-8"
        ) from error
    if not text:
        raise ValueError(f"{path} is empty; expected a text to evaluate")
    return text


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text, none added."""
    return tokenizer.encode(text, add_special_tokens=False)


def cut(token_ids: list[int], window: int, limit: int | None, name: str) -> list[list[int]]:
    """Windows of the first `limit` tokens of a text called `name`. Raises ValueError for fewer than two tokens."""
    if limit is not None and limit < 2:
        raise ValueError(f"--max_tokens is {limit}; expected at least 2: the first token of a window is given")
    token_ids = token_ids[:limit]
    if len(token_ids) < 2:
        raise ValueError(f"{name} has {len(token_ids)} tokens; expected at least 2")
    if len(token_ids) < window:
        logger.warning("the text has %d tokens, fewer than a window of %d", len(token_ids), window)
        return [token_ids]
    whole = len(token_ids) // window * window
    if whole < len(token_ids):
        logger.info("the last %d of %d tokens are dropped: no whole window", len(token_ids) - whole, len(token_ids))
    return [token_ids[start : start + window] for start in range(0, whole, window)]


def make_runner(loaded: LoadedModel, config: EngineConfig, window: int) -> Runner:
    """A runner for one text of up to `window` tokens at a time. Raises ValueError for more than the model takes."""
    limit = loaded.config.max_position
    if window > limit:
        raise ValueError(f"--window is {window}, but the model was made for up to {limit} tokens; lower it")
    config = dataclasses.replace(
        config,
        max_sequences=1,
        max_length=window,
        max_step_tokens=min(config.max_step_tokens, window),
        cache=dataclasses.replace(config.cache, num_pages=None),
    )
    return Runner(loaded.model, config, make_mesh(config.mesh))


def load_reference(path: str, cache_dir: Path, engine_config: EngineConfig) -> LoadedModel:
    """A model to compare with, in floating point, or as it is if it is a converted checkpoint."""
    local = hub.local_path(path)
    source = ModelSource(
        checkpoint_path=str(local),
        quantize_type=None if detect.format_of(local) == detect.NATIVE else NONE,
        cache_dir=cache_dir,
    )
    return build.load_source(source, engine_config, progress=loading("reference"))


def check_comparable(path: str, reference: LoadedModel, loaded: LoadedModel, text: str) -> None:
    """Checks that the reference at `path` speaks of the same tokens as a model. Raises ValueError if it does not."""
    found, expected = reference.config.vocab_size, loaded.config.vocab_size
    if found != expected:
        raise ValueError(
            f"--reference_checkpoint {path} has a vocabulary of {found} tokens, the model one of {expected};"
            " expected the same: only models with one tokenizer can be compared"
        )
    if reference.tokenizer is not None and encode(reference.tokenizer, text) != encode(
        build.tokenizer_of(loaded), text
    ):
        raise ValueError(
            f"--reference_checkpoint {path} has another tokenizer: the text's tokens differ from the model's; expected"
            " the same"
        )
