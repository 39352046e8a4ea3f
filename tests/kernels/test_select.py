"""How an implementation is chosen."""

from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetserve.kernels import select

OPERATIONS = ("argmax", "attention", "embedding_lookup", "projections", "quantized_matmul", "rms_norm", "rope")


def refuse(*_: Any, **__: Any) -> None:
    raise NotImplementedError("too odd")


@pytest.fixture
def operation(monkeypatch: pytest.MonkeyPatch) -> str:
    """An operation "op" with three implementations, best first: `best` for CPUs, `other` for TPUs, `plain` for all."""

    def module(name: str, platforms: frozenset[str] | None, priority: int, **functions: Any) -> Any:
        return SimpleNamespace(__name__=f"op.{name}", PLATFORMS=platforms, PRIORITY=priority, **functions)

    modules = {
        "best": module(
            "best", frozenset({"cpu"}), 20, run=lambda x: refuse() if x < 0 else f"best {x}", prepare=refuse
        ),
        "other": module("other", frozenset({"tpu"}), 10, run=lambda x: f"other {x}", prepare=lambda w: f"other {w}"),
        "plain": module("plain", None, 0, run=lambda x: refuse() if x < -1 else f"plain {x}"),
    }
    real = select.implementations
    monkeypatch.setattr(select, "implementations", lambda op: modules if op == "op" else real(op))
    return "op"


def names(modules: list[ModuleType]) -> list[str]:
    return [module.__name__.split(".")[-1] for module in modules]


def test_the_best_of_the_platform_is_tried_first(operation: str) -> None:
    assert names(select.candidates(operation)) == ["best", "plain"]
    assert select.call(operation, 1) == "best 1"
    with select.platform("tpu"):
        assert names(select.candidates(operation)) == ["other", "plain"]
        assert select.call(operation, 1) == "other 1"
    assert select.call(operation, 1) == "best 1"


def test_what_refuses_is_passed_over(operation: str) -> None:
    assert select.call(operation, -1) == "plain -1"
    with pytest.raises(NotImplementedError, match=r"of op takes these arguments \(best: too odd; plain: too odd\)"):
        select.call(operation, -2)


def test_a_named_one_or_an_error(operation: str) -> None:
    assert select.call(operation, 1, implementation="plain") == "plain 1"
    assert select.call(operation, 1, implementation="other") == "other 1"
    with pytest.raises(NotImplementedError, match="best: too odd"):
        select.call(operation, -1, implementation="best")
    with pytest.raises(ValueError, match="op has no implementation 'missing'; expected one of best, other, plain"):
        select.call(operation, 1, implementation="missing")


def test_choices_hold_within_and_nest(operation: str) -> None:
    with select.choose(op="plain"):
        assert select.call(operation, 1) == "plain 1"
        with select.choose(op="other", attention="xla"):
            assert select.call(operation, 1) == "other 1"
        assert select.call(operation, 1) == "plain 1"
        assert select.call(operation, 1, implementation="best") == "best 1"
    assert select.call(operation, 1) == "best 1"
    with pytest.raises(ValueError, match="op has no implementation 'missing'"), select.choose(op="missing"):
        pass


def test_prepare(operation: str) -> None:
    """By the first that takes the weight; unchanged where that one has no wish."""
    assert select.prepare(operation, "w") == "w"
    with select.platform("tpu"):
        assert select.prepare(operation, "w") == "other w"
    with pytest.raises(NotImplementedError, match="best: too odd"):
        select.prepare(operation, "w", implementation="best")


def test_explaining_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name, what it would return, and who refused; nothing runs."""
    small = SimpleNamespace(
        __name__="op.small", PLATFORMS=None, PRIORITY=20, run=lambda x: refuse() if x.size > 2 else x
    )
    large = SimpleNamespace(__name__="op.large", PLATFORMS=None, PRIORITY=0, run=lambda x: x + 1)
    monkeypatch.setattr(select, "implementations", lambda op: {"small": small, "large": large})
    choice = select.explain("op", jnp.ones(2))
    assert (choice.name, choice.refused) == ("small", {})
    choice = select.explain("op", jax.ShapeDtypeStruct((3,), jnp.float32))
    assert (choice.name, choice.refused) == ("large", {"small": "too odd"})
    assert choice.result == jax.ShapeDtypeStruct((3,), jnp.float32)
    prepared = select.explain_prepare("op", "w")
    assert (prepared.name, prepared.result) == ("small", "w")


def test_faults_of_an_implementation_are_not_hidden(operation: str) -> None:
    with pytest.raises(TypeError):
        select.call(operation, "no number")


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("platform", ["cpu", "tpu", "cuda", "rocm"])
def test_every_operation_has_the_reference_on_every_platform(op: str, platform: str) -> None:
    with select.platform(platform):
        assert "xla" in names(select.candidates(op))
    found = select.implementations(op)
    priorities = [module.PRIORITY for module in found.values()]
    assert priorities == sorted(priorities, reverse=True)
    assert priorities[-1] == found["xla"].PRIORITY


def test_the_selection_is_a_key_for_programs() -> None:
    before = select.selection()
    assert before == select.selection()
    assert hash(before) == hash(select.selection())
    with select.choose(quantized_matmul="xla"):
        assert select.selection() != before
    with select.platform("tpu"):
        assert select.selection() != before
    assert select.selection() == before


def test_a_choice_is_seen_while_tracing() -> None:
    with select.choose(quantized_matmul="xla"):
        y = jax.jit(lambda x, w: select.call("quantized_matmul", x, w))(jnp.ones((2, 3)), jnp.ones((3, 4)))
    np.testing.assert_array_equal(y, np.full((2, 4), 3.0))
