"""What kernels there are on this machine: what is built, what the processor can do, and what each operation would run.

Owns the typical arguments that the operations are asked about. `python -m jetserve.kernels` prints it.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jetserve.kernels import native, select
from jetserve.kernels.attention import KVPages, RaggedBatch
from jetserve.kernels.native import builder
from jetserve.quantize.qarray import QUANTIZE_TYPES, QuantizationConfig, Weight, by_expert, cast_values, quantize

FEATURES = (
    *("sse4_2", "avx", "f16c", "fma", "avx2", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16"),
    *("amx_int8", "asimd", "asimddp", "i8mm", "bf16", "sve"),
)
"""Of processors, as Linux names them, that kernels may care for."""
T, N, K, H, PAGES, PAGE_SIZE = 4, 8, 4, 64, 8, 16
D, OUT, EXPERTS = 256, 128, 2
"""Sizes of the arguments that are asked about."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Library:
    """The compiled kernels. Without them, `error` says why; else `instructions` names what they were written for."""

    path: Path | None = None
    size: int = 0
    compiler: str = ""
    instructions: str = ""
    error: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """`choices`: by operation and arguments, such as "attention, int8 pages", the implementation that runs."""

    library: Library
    features: Mapping[str, bool]
    platform: str
    choices: Mapping[str, select.Choice]

    def as_json(self) -> dict[str, Any]:
        """Plain data; sizes in bytes."""
        library = {**dataclasses.asdict(self.library), "path": str(self.library.path) if self.library.path else None}
        choices = {
            name: {"implementation": choice.name, "refused": dict(choice.refused)}
            for name, choice in self.choices.items()
        }
        return {
            "library": library,
            "features": dict(self.features),
            "platform": self.platform,
            "choices": choices,
        }

    def __str__(self) -> str:
        lines = ["library"]
        if self.library.path is None:
            lines.append(f"  none: {self.library.error}")
        else:
            lines.append(f"  {self.library.path}, {self.library.size / 1024:.0f} KiB")
            lines += [f"  compiled by {self.library.compiler}", f"  instructions: {self.library.instructions}"]
        there = [name for name, has in self.features.items() if has]
        lines += ["processor", f"  has {' '.join(there) or 'none of the features below'}"]
        lines.append(f"  has not {' '.join(name for name in self.features if name not in there)}")
        lines.append(f"implementations on {self.platform}")
        width = max(len(name) for name in self.choices)
        for name, choice in self.choices.items():
            refused = "; ".join(f"{other} refuses: {reason}" for other, reason in choice.refused.items())
            lines.append(f"  {name:{width}}  {choice.name or 'NONE':12}  {refused}".rstrip())
        return "\n".join(lines)


def report() -> Report:
    """The report for this machine and the platform that jax would use. Builds the library if it is not there."""
    return Report(
        library=_library(),
        features=processor_features(builder.processor()),
        platform=select.current_platform(),
        choices=dict(_choices()),
    )


def processor_features(description: str) -> dict[str, bool]:
    """Which of `FEATURES` a processor has, for what `builder.processor` says of it."""
    words = set(description.split())
    return {name: name in words for name in FEATURES}


def _library() -> Library:
    found = native.loaded()
    if found.path is None:
        return Library(error=found.error)
    return Library(
        path=found.path,
        size=found.path.stat().st_size,
        compiler=native.compiler(),
        instructions=native.instructions(),
    )


def _choices() -> Iterator[tuple[str, select.Choice]]:
    x, ids = jnp.zeros((T, D)), jnp.zeros(T, jnp.int32)
    sizes = jnp.full(EXPERTS, T // EXPERTS, jnp.int32)
    for name, weight in _weights().items():
        prepared = select.explain_prepare("quantized_matmul", weight)
        w, refused = prepared.result, prepared.refused
        # Who refused to prepare a weight says why; that it does not know another's layout says less.
        yield f"quantized_matmul, {name}", _with(select.explain("quantized_matmul", x, w), refused)
        yield f"projections, {name}", _with(select.explain("projections", x, [w], [None]), refused)
        yield f"embedding_lookup, {name}", select.explain("embedding_lookup", ids, w, dtype=jnp.float32)
        prepared = select.explain_prepare("grouped_matmul", by_expert(weight, EXPERTS))
        grouped = select.explain("grouped_matmul", x, prepared.result, sizes)
        yield f"grouped_matmul, {name}", _with(grouped, prepared.refused)
    q, kv = jnp.zeros((T, N, H)), jnp.zeros((T, K, H))
    yield "rms_norm", select.explain("rms_norm", x, jnp.ones(D), epsilon=1e-5)
    yield "argmax", select.explain("argmax", x)
    yield "rope", select.explain("rope", q, kv, ids, jnp.ones(H // 2))
    batch = RaggedBatch(
        tokens=ids,
        positions=ids,
        query_starts=jnp.zeros(T + 1, jnp.int32),
        kv_lengths=ids,
        page_table=jnp.zeros((T, PAGES), jnp.int32),
        max_query_length=1,
    )
    values = jnp.zeros((PAGES, PAGE_SIZE, 2 * K, H))
    for name, pages in {
        "float32 pages": KVPages(values=values),
        "bfloat16 pages": KVPages(values=values.astype(jnp.bfloat16)),
        "int8 pages": KVPages(values=values.astype(jnp.int8), scale=values[..., 0]),
    }.items():
        yield f"attention, {name}", select.explain("attention", q, kv, kv, pages, batch, scale=1.0)


def _weights() -> dict[str, Weight]:
    """A weight [D, OUT] of every type, in the types that models hold them in."""
    plain = jnp.zeros((D, OUT))
    configs = {name: QuantizationConfig.from_name(name) for name in QUANTIZE_TYPES}
    activations = QuantizationConfig.from_name("int8_per_channel", quantize_activation=True)
    configs["int8_per_channel, int8 activations"] = activations
    quantized = {name: cast_values(quantize(plain, config), config.bits) for name, config in configs.items()}
    return {"float32": plain, **quantized}


def _with(choice: select.Choice, refused: Mapping[str, str]) -> select.Choice:
    """The choice, with the reasons of those who refused before."""
    return dataclasses.replace(choice, refused={**choice.refused, **refused})
