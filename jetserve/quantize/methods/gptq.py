"""GPTQ: rounds one row of a weight after the other, and lets the rows that are left make up for each error.

Follows Frantar et al. 2023, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers". Owns
the mathematics on one weight and the second moments of its input; where those come from is `calibrate`'s business.

The papers' W [N, K] is the transpose of W [K, N] here, so their columns are rows. H [K, K] is the mean of x x^T.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jetserve.method_config import Clip, GPTQConfig
from jetserve.quantize import clipping
from jetserve.quantize.qarray import QArray, QuantizationConfig, dequantize, fit_range, round_to
from jetserve.quantize.refinement import refine

LAZY_ROWS = 128
"""Rows of a per-channel weight after which their errors are spread over all later rows at once."""
DAMPING_TRIES = 6
"""Each with ten times the damping of the one before."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """See `method_config.GPTQConfig`."""

    act_order: bool = False
    static_groups: bool = False
    damping: float = 0.01
    clip: Clip = Clip.NONE
    sweeps: int = 0

    @classmethod
    def of(cls, config: GPTQConfig) -> "Options":
        """What the mathematics takes of a user's settings."""
        return cls(**{field.name: getattr(config, field.name) for field in dataclasses.fields(cls)})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Factor:
    """What all weights that take the same input share.

    Attributes:
      upper: float32 [K, K], upper triangular U with U^T U = (H + damping)^-1, rows in the order of `order`.
      order: int32 [K], the row of W that is rounded at each step.
      importance: float32 [K], the mean square of each input, in W's own order; 0 for inputs that were never there.
      hessian: float32 [K, K], H + damping, in W's own order.
    """

    upper: jax.Array
    order: jax.Array
    importance: jax.Array
    hessian: jax.Array


def factorize(hessian: jax.Array, options: Options) -> Factor | None:
    """Factorizes H, damped as little as it takes.

    Args:
      hessian: float32 [K, K].
      options: its order and damping.

    Returns:
      None if H holds NaN or infinite values, or no damping that was tried makes it positive definite.
    """
    if not bool(jnp.all(jnp.isfinite(hessian))):
        return None
    damping = options.damping
    for _ in range(DAMPING_TRIES):
        factor = _factorize(hessian, damping, options.act_order)
        if bool(jnp.all(jnp.isfinite(factor.upper))):
            return factor
        damping *= 10
    return None


@functools.partial(jax.jit, static_argnames=("act_order",))
def _factorize(hessian: jax.Array, damping: float, act_order: bool) -> Factor:
    importance = jnp.diagonal(hessian)
    K = importance.size
    order = jnp.argsort(-importance) if act_order else jnp.arange(K)
    # Inputs that were never there have rows of zeros: a 1 on the diagonal keeps them apart from all others.
    hessian += jnp.diag(jnp.where(importance == 0, 1.0, 0.0) + damping * jnp.mean(importance))
    h = hessian[order][:, order]
    # H = R R^T with R upper triangular, from the Cholesky factor of H turned by 180 degrees. Then U = R^-1.
    turned = jnp.linalg.cholesky(h[::-1, ::-1])[::-1, ::-1]
    upper = jax.scipy.linalg.solve_triangular(turned, jnp.eye(K, dtype=h.dtype), lower=False)
    return Factor(upper=upper, order=order.astype(jnp.int32), importance=importance, hessian=hessian)


def quantize_matrix(w: jax.Array, factor: Factor, config: QuantizationConfig, options: Options) -> QArray | None:
    """Rounds a weight so that its products with the inputs change little.

    Args:
      w: float32 [K, N].
      factor: of its input, made with the same options.
      config: its block size must divide K.
      options: of the method.

    Returns:
      A QArray with values in an int8 container. Rows of inputs that were never there are rounded as zeros. None if
      the weights grow beyond all bounds on the way.
    """
    w = jnp.where(factor.importance[:, None] == 0, 0.0, w)
    qarray = _quantize(w, factor, config, options)
    if options.sweeps:
        qarray = refine(w, qarray, factor.hessian, bits=config.bits, sweeps=options.sweeps)
    return qarray if bool(jnp.all(jnp.isfinite(qarray.scale))) else None


@functools.partial(jax.jit, static_argnames=("config", "options"))
def _quantize(w: jax.Array, factor: Factor, config: QuantizationConfig, options: Options) -> QArray:
    K, N = w.shape
    g = config.block_size or K
    importance = factor.importance.reshape(-1, g)
    scale, zero_point = _scales(w.reshape(-1, g, N), importance, config, options)
    # Scales that follow the compensated weights are taken where a turn of the loop begins, so a turn is a block.
    follow = config.block_size is not None and not (options.act_order or options.static_groups)
    B = g if follow else min(LAZY_ROWS, K)
    padding = -K % B
    rows = jnp.pad(w[factor.order], ((0, padding), (0, 0)))
    groups = jnp.pad(factor.order // g, (0, padding))
    upper = jnp.pad(factor.upper, ((0, padding), (0, padding))) + jnp.diag(jnp.arange(K + padding) >= K)

    def turn(b: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        rows, values, scale, zero_point = state
        part = jax.lax.dynamic_slice_in_dim(rows, b * B, B)
        if follow:
            current = _scales(part, importance[b], config, options)
            scale, zero_point = scale.at[b].set(current[0]), zero_point.at[b].set(current[1])
        group = jax.lax.dynamic_slice_in_dim(groups, b * B, B)
        coefficients = jax.lax.dynamic_slice_in_dim(upper, b * B, B)  # [B, K], 0 for rows that are done
        own = jax.lax.dynamic_slice_in_dim(coefficients, b * B, B, axis=1)
        rounded, errors = _round_rows(part, own, scale[group], zero_point[group], config.bits)
        rows -= coefficients.T @ errors
        return rows, jax.lax.dynamic_update_slice_in_dim(values, rounded, b * B, 0), scale, zero_point

    state = (rows, jnp.zeros(rows.shape, jnp.int8), scale, zero_point)
    _, values, scale, zero_point = jax.lax.fori_loop(0, rows.shape[0] // B, turn, state)
    values = jnp.zeros((K, N), jnp.int8).at[factor.order].set(values[:K])
    return QArray(
        values=values if config.block_size is None else values.reshape(-1, g, N),
        scale=scale[0] if config.block_size is None else scale,
        zero_point=None if config.symmetric else zero_point[0] if config.block_size is None else zero_point,
        block_size=config.block_size,
        quantize_activation=config.quantize_activation,
    )


def _scales(
    w: jax.Array, importance: jax.Array, config: QuantizationConfig, options: Options
) -> tuple[jax.Array, jax.Array]:
    """[..., g, N] with importance [..., g] -> scale and zero point [..., N].

    The zero point is 0 for symmetric weights. A scale that underflows becomes 1, and its weights zeros.
    """
    fit = clipping.search(w, importance, config) if options.clip is Clip.MSE else fit_range(w, config)
    usable = fit[0] >= jnp.finfo(jnp.float32).tiny
    zero_point = jnp.zeros_like(fit[0]) if fit[1] is None else fit[1]
    return jnp.where(usable, fit[0], 1.0), jnp.where(usable, zero_point, 0.0)


def _round_rows(
    rows: jax.Array, upper: jax.Array, scales: jax.Array, zero_points: jax.Array, bits: int
) -> tuple[jax.Array, jax.Array]:
    """Rounds rows one after the other, each after the errors of those before it.

    Args:
      rows: [B, N].
      upper: [B, B], their part of U.
      scales: [B, N], as are the zero points.
      zero_points: integers.
      bits: of the values.

    Returns:
      int8 values [B, N], and errors [B, N], which U's further elements spread over later rows.
    """

    def step(rows: jax.Array, i: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        value = round_to(rows[i][None], scales[i], zero_points[i], bits)[0]
        error = (rows[i] - (value - zero_points[i]) * scales[i]) / upper[i, i]
        return rows - upper[i][:, None] * error, (value.astype(jnp.int8), error)

    return jax.lax.scan(step, rows, jnp.arange(rows.shape[0]))[1]


@jax.jit
def output_error(w: jax.Array, rounded: QArray, hessian: jax.Array) -> jax.Array:
    """The mean square of what rounding changes in the products with the inputs, over that of the products."""
    difference = dequantize(rounded) - w
    return jnp.sum(difference * (hessian @ difference)) / jnp.maximum(jnp.sum(w * (hessian @ w)), 1e-30)
