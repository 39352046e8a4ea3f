"""Attention over pages against a plain loop over sequences, heads and positions."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetserve.kernels import native, select
from jetserve.kernels.attention import KVPages, RaggedBatch

IMPLEMENTATIONS = list(select.implementations("attention"))
GARBAGE = np.nan
"""Wherever no sequence has a token, as another one that overflowed may have left there: no result may show it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """`sequences`: (tokens already in the pages, tokens of this batch) of each."""

    sequences: tuple[tuple[int, int], ...]
    heads: int = 8
    kv_heads: int = 4
    head_size: int = 16
    page_size: int = 8
    padding: int = 0
    empty: int = 0
    sliding_window: int | None = None
    soft_cap: float | None = None
    alibi: bool = False
    sinks: bool = False
    int8: bool = False
    dtype: str = "float32"

    @property
    def id(self) -> str:
        heads = f"{self.heads}/{self.kv_heads}x{self.head_size}"
        sequences = ",".join(f"{old}+{new}" for old, new in self.sequences)
        extra = [f"window{self.sliding_window}"] if self.sliding_window else []
        extra += [f"cap{self.soft_cap}"] if self.soft_cap else []
        extra += [name for name in ("padding", "empty", "alibi", "sinks", "int8") if getattr(self, name)]
        return "-".join([sequences, heads, f"p{self.page_size}", self.dtype, *extra])

    @property
    def slopes(self) -> np.ndarray | None:
        """float32 [N], as BLOOM has them for a power of two heads."""
        return (
            np.float32(2.0) ** -(8 * np.arange(1, self.heads + 1, dtype=np.float32) / self.heads)
            if self.alibi
            else None
        )

    @property
    def sink_scores(self) -> np.ndarray | None:
        """float32 [N], below and above those of the keys."""
        return np.linspace(-3, 6, self.heads, dtype=np.float32) if self.sinks else None


CASES = [
    Case(sequences=((0, 1),)),
    Case(sequences=((19, 1),)),
    Case(sequences=((0, 20),)),
    Case(sequences=((13, 1), (40, 1), (0, 1), (7, 1)), empty=4, padding=4),
    Case(sequences=((30, 1), (5, 1), (0, 23), (16, 9)), empty=2, padding=27),
    Case(sequences=((9, 70), (64, 64), (3, 2)), padding=5),
    Case(sequences=((0, 200),), page_size=16),
    Case(sequences=((300, 1), (255, 1), (256, 1), (2, 1)), page_size=16),
    Case(sequences=((250, 40), (511, 3)), page_size=16, empty=1),
    Case(sequences=((21, 1), (0, 17)), heads=4, kv_heads=4),
    Case(sequences=((21, 1), (0, 17)), heads=9, kv_heads=3, head_size=64),
    Case(sequences=((21, 1), (0, 17)), heads=8, kv_heads=1, padding=14),
    Case(sequences=((21, 1), (0, 17)), page_size=1),
    Case(sequences=((40, 1), (0, 30), (11, 12)), sliding_window=7, empty=1),
    Case(sequences=((300, 1), (290, 20)), sliding_window=20, page_size=16),
    Case(sequences=((40, 1), (0, 3)), sliding_window=1),
    Case(sequences=((40, 1), (0, 3)), sliding_window=500),
    Case(sequences=((13, 1), (40, 1), (0, 1), (7, 1)), empty=4, padding=4, int8=True),
    Case(sequences=((30, 1), (5, 1), (0, 23), (16, 9)), padding=27, int8=True),
    Case(sequences=((300, 1), (290, 20)), sliding_window=20, page_size=16, int8=True),
    Case(sequences=((21, 1), (0, 40)), heads=32, kv_heads=1, head_size=24),
    Case(sequences=((21, 1), (0, 17)), heads=4, kv_heads=2, head_size=12),
    Case(sequences=((21, 1), (0, 17)), heads=2, kv_heads=1, head_size=264),
    Case(sequences=((40, 1), (0, 30), (11, 12)), alibi=True, empty=1),
    Case(sequences=((300, 1), (5, 9)), alibi=True, heads=8, kv_heads=8, page_size=16),
    Case(sequences=((40, 1), (0, 30), (11, 12)), soft_cap=2.0, padding=3),
    Case(sequences=((300, 1), (5, 9)), soft_cap=0.5, page_size=16, int8=True),
    Case(sequences=((300, 1), (290, 20)), soft_cap=30.0, alibi=True, sliding_window=20, page_size=16),
    Case(sequences=((40, 1), (0, 30)), soft_cap=3.0, alibi=True, int8=True),
    Case(sequences=((40, 1), (0, 30), (11, 12)), sinks=True, empty=1, padding=3),
    Case(sequences=((300, 1), (290, 20)), sinks=True, sliding_window=20, page_size=16, int8=True),
    Case(sequences=((30, 1), (0, 23)), dtype="bfloat16"),
    Case(sequences=((30, 1), (0, 23)), dtype="bfloat16", int8=True),
]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
every_implementation = pytest.mark.parametrize("name", IMPLEMENTATIONS)


@dataclasses.dataclass
class Problem:
    """One call: its arrays, and the whole of every sequence's keys and values, [length, K, H] in float64."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    pages: KVPages
    batch: RaggedBatch
    keys: list[np.ndarray]
    values: list[np.ndarray]

    @classmethod
    def make(cls, case: Case, seed: int = 0) -> "Problem":
        rng = np.random.default_rng(seed)
        K, H, size = case.kv_heads, case.head_size, case.page_size
        lengths = [old + new for old, new in case.sequences]
        counts = [-(-length // size) for length in lengths]
        S, P = len(lengths) + case.empty, max(counts) + 2
        ids = rng.permutation(sum(counts) + 3) + 1  # three pages are nobody's
        table = np.zeros((S, P), np.int32)
        pool = np.full((len(ids) + 1, size, 2 * K, H), GARBAGE)
        used = 0
        T = sum(new for _, new in case.sequences) + case.padding
        tensors = {name: np.zeros((T, heads, H)) for name, heads in (("q", case.heads), ("k", K), ("v", K))}
        tensors = {name: rng.standard_normal(t.shape) for name, t in tensors.items()}
        positions = np.zeros(T, np.int32)
        starts, kv_lengths = np.zeros(S + 1, np.int32), np.zeros(S, np.int32)
        keys, values, start = [], [], 0
        for i, (old, new) in enumerate(case.sequences):
            table[i, : counts[i]] = ids[used : used + counts[i]]
            used += counts[i]
            key, value = (rng.standard_normal((old + new, K, H)) for _ in range(2))
            for position in range(old):
                page, offset = table[i, position // size], position % size
                pool[page, offset] = np.stack([key[position], value[position]], axis=1).reshape(2 * K, H)
            stop = start + new
            key[old:], value[old:] = tensors["k"][start:stop], tensors["v"][start:stop]
            positions[start:stop] = np.arange(old, old + new)
            starts[i + 1 :], kv_lengths[i] = stop, old + new
            start = stop
            keys.append(key)
            values.append(value)
        dtype = jnp.dtype(case.dtype)
        if case.int8:
            scale = np.abs(pool).max(axis=-1) / 127
            rounded = np.nan_to_num(np.round(pool / scale[..., None]), nan=77)
            pages = KVPages(values=jnp.asarray(rounded, jnp.int8), scale=jnp.asarray(scale, jnp.float32))
        else:
            pages = KVPages(values=jnp.asarray(pool, dtype))
        decode = all(new == 1 for _, new in case.sequences) and S == T
        return cls(
            **{name: jnp.asarray(t, dtype) for name, t in tensors.items()},
            pages=pages,
            batch=RaggedBatch(
                tokens=jnp.zeros(T, jnp.int32),
                positions=jnp.asarray(positions),
                query_starts=jnp.asarray(starts),
                kv_lengths=jnp.asarray(kv_lengths),
                page_table=jnp.asarray(table),
                max_query_length=1 if decode else T,
            ),
            keys=keys,
            values=values,
        )

    def run(self, name: str | None, case: Case) -> tuple[np.ndarray, KVPages]:
        rules = {
            "scale": case.head_size**-0.5,
            "sliding_window": case.sliding_window,
            "soft_cap": case.soft_cap,
            "alibi_slopes": None if case.slopes is None else jnp.asarray(case.slopes),
            "sinks": None if case.sink_scores is None else jnp.asarray(case.sink_scores),
        }

        def call(*args: object) -> tuple[jax.Array, KVPages]:
            return select.call("attention", *args, **rules, implementation=name)

        try:
            out, pages = jax.jit(call)(self.q, self.k, self.v, self.pages, self.batch)
        except NotImplementedError as reason:
            pytest.skip(f"{name} refuses: {reason}")
        assert (out.shape, out.dtype) == (self.q.shape, self.q.dtype)
        return np.asarray(out, np.float64), pages

    def expected(self, case: Case) -> np.ndarray:
        """[T, N, H] for the tokens that are there."""
        q = np.asarray(self.q, np.float64)
        repeat = case.heads // case.kv_heads
        rows, start = [], 0
        for (old, new), key, value in zip(case.sequences, self.keys, self.values, strict=True):
            key, value = np.repeat(key, repeat, axis=1), np.repeat(value, repeat, axis=1)
            for i in range(new):
                position = old + i
                first = 0 if case.sliding_window is None else max(0, position + 1 - case.sliding_window)
                seen = slice(first, position + 1)
                scores = np.einsum("nh,cnh->nc", q[start + i], key[seen]) * case.head_size**-0.5
                if case.soft_cap is not None:
                    scores = case.soft_cap * np.tanh(scores / case.soft_cap)
                if case.slopes is not None:
                    scores += case.slopes[:, None].astype(np.float64) * (np.arange(first, position + 1) - position)
                weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
                total = weights.sum(axis=-1)
                if case.sink_scores is not None:
                    total += np.exp(case.sink_scores - scores.max(axis=-1))
                weights /= total[:, None]
                rows.append(np.einsum("nc,cnh->nh", weights, value[seen]))
            start += new
        return np.stack(rows)


@functools.cache
def solved(case: Case, name: str) -> tuple[Problem, np.ndarray, KVPages]:
    """A problem and its result, which two tests look at."""
    problem = Problem.make(case)
    return problem, *problem.run(name, case)


@every_implementation
@every_case
def test_attention(case: Case, name: str) -> None:
    problem, found, _ = solved(case, name)
    expected = problem.expected(case)
    assert np.isfinite(found).all()
    tolerance = 0.03 if case.int8 or case.dtype == "bfloat16" else 1e-5
    assert np.abs(found[: len(expected)] - expected).max() < tolerance


@every_implementation
@every_case
def test_what_is_written(case: Case, name: str) -> None:
    """This batch's keys and values at their places, and every other place as it was, page 0 excepted."""
    problem, _, pages = solved(case, name)
    found, scale = np.asarray(pages.values, np.float64), pages.scale
    before = np.asarray(problem.pages.values, np.float64)
    table = np.asarray(problem.batch.page_table)
    untouched = np.ones(before.shape[:2], bool)
    untouched[0] = False
    for i, (old, new) in enumerate(case.sequences):
        for position in range(old, old + new):
            page, offset = table[i, position // case.page_size], position % case.page_size
            untouched[page, offset] = False
            row = found[page, offset]
            if scale is not None:
                row = row * np.asarray(scale, np.float64)[page, offset][:, None]
            both = np.stack([problem.keys[i][position], problem.values[i][position]], axis=1)
            expected = both.reshape(2 * case.kv_heads, case.head_size)
            half_step = np.abs(expected).max(axis=-1, keepdims=True) / 127 * 0.501 if case.int8 else 0
            rounding = np.abs(expected) * 2.0**-7 if case.dtype == "bfloat16" else 1e-6
            assert (np.abs(row - expected) <= half_step + rounding).all()
    np.testing.assert_array_equal(found[untouched], before[untouched])
    if scale is not None:
        assert problem.pages.scale is not None
        np.testing.assert_array_equal(np.asarray(scale)[untouched], np.asarray(problem.pages.scale)[untouched])


@every_implementation
@pytest.mark.parametrize("int8", [False, True])
def test_rows_of_zeros(name: str, int8: bool) -> None:
    """Zero keys give equal weights, zero values give zeros, neither NaN."""
    case = Case(sequences=((0, 5), (12, 1)), int8=int8)
    problem = Problem.make(case)
    problem.k, problem.v = jnp.zeros_like(problem.k), jnp.zeros_like(problem.v)
    found, pages = problem.run(name, case)
    assert np.isfinite(found).all()
    np.testing.assert_array_equal(found[:5], 0)
    if pages.scale is not None:
        assert not (np.asarray(pages.scale) <= 0).any()


@every_implementation
@pytest.mark.parametrize("field", ["k", "v"])
def test_nan_stays_nan_in_int8_pages(name: str, field: str) -> None:
    case = Case(sequences=((0, 5),), int8=True)
    problem = Problem.make(case)
    setattr(problem, field, getattr(problem, field).at[0, :, 3].set(jnp.nan))
    found, _ = problem.run(name, case)
    assert np.isnan(found).any(axis=-1).all()


def test_arrays_that_do_not_belong_together_are_refused() -> None:
    """The kernel trusts their sizes."""
    case = Case(sequences=((0, 5),))
    for field, change in (
        ("k", lambda a: a[:1]),
        ("v", lambda a: a[:, :1]),
        ("v", lambda a: a[..., :8]),
        ("pages", lambda pages: dataclasses.replace(pages, values=pages.values[:, :, :2])),
        ("batch", lambda batch: dataclasses.replace(batch, positions=batch.positions[:3])),
    ):
        problem = Problem.make(case)
        setattr(problem, field, change(getattr(problem, field)))
        with pytest.raises(jax.errors.JaxRuntimeError, match="shapes differ"):
            problem.run("cpu", case)


def test_float16_pages_go_to_another_implementation() -> None:
    case = Case(sequences=((0, 5),))
    problem = Problem.make(case)
    problem.pages = dataclasses.replace(problem.pages, values=problem.pages.values.astype(jnp.float16))
    with pytest.raises(NotImplementedError, match="pages of float16"):
        problem.run("cpu", case)


@every_implementation
@pytest.mark.parametrize("soft_cap", [3.0, 1e3, 1e6])
def test_soft_caps_near_and_far(name: str, soft_cap: float) -> None:
    case = Case(sequences=((3, 20),), soft_cap=soft_cap)
    problem = Problem.make(case)
    np.testing.assert_allclose(problem.run(name, case)[0], problem.expected(case), atol=1e-5)


@every_implementation
def test_what_padding_holds_does_not_matter(name: str) -> None:
    case = Case(sequences=((30, 1), (0, 10)), padding=9, empty=3)
    problem = Problem.make(case)
    found, pages = problem.run(name, case)
    real = 11
    for field in ("q", "k", "v"):
        setattr(problem, field, getattr(problem, field).at[real:].set(jnp.nan))
    again, pages_again = problem.run(name, case)
    np.testing.assert_array_equal(again[:real], found[:real])
    np.testing.assert_array_equal(pages_again.values[1:], pages.values[1:])


@every_implementation
def test_a_batch_of_padding_alone(name: str) -> None:
    """As warm-up runs it."""
    case = Case(sequences=((4, 1),))
    problem = Problem.make(case)
    zeros = jax.tree.map(jnp.zeros_like, problem.batch)
    problem.batch = zeros
    found, pages = problem.run(name, case)
    assert np.isfinite(found).all()
    np.testing.assert_array_equal(pages.values[1:], problem.pages.values[1:])


@every_implementation
def test_sequences_may_share_pages(name: str) -> None:
    """Two prompts with a prefix in common: the second reads the first one's pages."""
    case = Case(sequences=((16, 3), (16, 5)))
    problem = Problem.make(case)
    table = np.array(problem.batch.page_table)
    table[1, :2] = table[0, :2]
    problem.batch = dataclasses.replace(problem.batch, page_table=jnp.asarray(table))
    for rows in (problem.keys, problem.values):
        rows[1][:16] = rows[0][:16]
    found, _ = problem.run(name, case)
    np.testing.assert_allclose(found, problem.expected(case), atol=1e-5)


@every_implementation
@pytest.mark.parametrize("size", [30.0, 1e4])
def test_sharp_scores_do_not_overflow(name: str, size: float) -> None:
    case = Case(sequences=((0, 40),))
    problem = Problem.make(case)
    problem.q *= size
    found, _ = problem.run(name, case)
    np.testing.assert_allclose(found, problem.expected(case), atol=2e-3)


def test_a_head_size_that_the_kernel_refuses_runs_elsewhere() -> None:
    case = Case(sequences=((21, 1), (0, 17)), head_size=12)
    problem = Problem.make(case)
    found, _ = problem.run(None, case)
    np.testing.assert_allclose(found, problem.expected(case), atol=1e-5)


@pytest.mark.parametrize(
    ("field", "index", "value"),
    [("page_table", (0, 1), 10**6), ("page_table", (0, 0), -1), ("query_starts", 2, 50), ("positions", 0, 10**6)],
)
def test_the_kernel_refuses_a_batch_that_points_elsewhere(field: str, index: int | tuple, value: int) -> None:
    """Before it writes: the numbers come from the host, and a wrong one must not reach another's memory."""
    if native.library() is None:
        pytest.skip("there is no C++ compiler")
    case = Case(sequences=((9, 1), (0, 10)))
    problem = Problem.make(case)
    wrong = np.array(getattr(problem.batch, field))
    wrong[index] = value
    problem.batch = dataclasses.replace(problem.batch, **{field: jnp.asarray(wrong)})
    with pytest.raises(jax.errors.JaxRuntimeError, match="points outside"):
        problem.run("cpu", case)
