"""Linear layers of a decode step of Llama-2-7B on TPUs, as the real compiler expects them to take, without a TPU.

    JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 python benchmarks/tpu_linears.py [v5e v6e ...]

Ours, the plain einsum over blocks (`scz,bdsc->bdsz`, then the scale) and bfloat16, each layer compiled by itself and
added up. A layer takes the compiler's estimate, or reading its weight at the published bandwidth where that is longer:
the estimates leave out weights that are fetched ahead. Our kernel's is its static profile (`tpu_tiles.py`), the others'
those in the compiled program: two models of one chip. Attention, the same for all, is left out. The last line of
standard output is a JSON object.
"""

import collections
import dataclasses
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from tpu_tiles import compile_for, weight

from jetserve.kernels import select
from jetserve.kernels.quantized_matmul import xla
from jetserve.plan import hlo
from jetserve.plan.chips import CHIPS
from jetserve.quantize.qarray import QArray, Weight

BATCHES = (1, 32, 96)
LAYERS = 32
LINEARS = {(4096, 4096): 4 * LAYERS, (4096, 11008): 2 * LAYERS, (11008, 4096): LAYERS}
"""How many of each (K, N); the output head is the same 8-bit one for all quantized types, and left out."""


def ours(x: jax.Array, w: Weight) -> jax.Array:
    """What a step runs."""
    with select.platform("tpu"):
        return select.call("quantized_matmul", x, w)


def einsum(x: jax.Array, w: QArray) -> jax.Array:
    """The plain form: sums of all blocks in x's dtype, scaled afterwards."""
    blocks = x.reshape(x.shape[0], 1, *w.values.shape[:2])
    sums = jnp.einsum("scz,bdsc->bdsz", w.values.astype(x.dtype), blocks)
    return jnp.einsum("bdsz,sz->bdz", sums, w.scale.astype(x.dtype))[:, 0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """A way to multiply: `function(x [rows, K], weight)` and the weight's shapes by (K, N)."""

    function: Callable[[jax.Array, Any], jax.Array]
    weight: Callable[[tuple[int, int]], Weight]


def quantized(function: Callable[..., jax.Array], type_name: str) -> Form:
    return Form(function=function, weight=lambda shape: weight(type_name, shape))


FORMS: Mapping[str, Form] = {
    "int4, ours": quantized(ours, "int4_blockwise"),
    "int4, einsum": quantized(einsum, "int4_blockwise"),
    "int8, ours": quantized(ours, "int8_blockwise"),
    "int8, einsum": quantized(einsum, "int8_blockwise"),
    "bfloat16": Form(function=xla.run, weight=lambda shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)),
}


def read_seconds(w: Weight, chip: str) -> float:
    """Of reading a weight once at the published bandwidth."""
    bits = w.size_in_bits if isinstance(w, QArray) else w.size * w.dtype.itemsize * 8
    return bits / 8 / CHIPS[chip].hbm_bytes_per_second


def milliseconds(chip: str, form: Form, rows: int) -> dict[str, float]:
    """Of the linear layers of a step: with the estimates, and reading alone."""
    total: dict[str, float] = collections.Counter()
    for shape, count in LINEARS.items():
        w = form.weight(shape)
        _, text = compile_for(chip, form.function, rows, w)
        read = read_seconds(w, chip)
        total["estimate"] += 1e3 * count * max(read, hlo.cycles(text, unknown_trips=1) / CHIPS[chip].hertz)
        total["reading"] += 1e3 * count * read
    return {key: round(value, 2) for key, value in total.items()}


def main() -> None:
    """Prints a row for people as each chip and batch is done, and all of them last."""
    found = []
    print("| | batch |", *(f"{name} |" for name in FORMS), file=sys.stderr)
    for chip in sys.argv[1:] or ("v5e", "v6e"):
        for rows in BATCHES:
            times = {name: milliseconds(chip, form, rows) for name, form in FORMS.items()}
            cells = (f"{time['estimate']:.1f} ({time['reading']:.1f}) |" for time in times.values())
            print(f"| {chip} | {rows} |", *cells, file=sys.stderr)
            found.append({"chip": chip, "batch_size": rows, "milliseconds": times})
    print(json.dumps({"linears": found}))


if __name__ == "__main__":
    main()
