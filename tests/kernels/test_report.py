"""What `python -m jetserve.kernels` says."""

import json
import pkgutil
import subprocess
import sys

import jax
import pytest

from jetserve import kernels
from jetserve.kernels import native, select
from jetserve.kernels.report import Library, processor_features, report

OPERATIONS = {info.name for info in pkgutil.iter_modules(kernels.__path__) if info.ispkg} - {"native"}


def test_it_says_what_would_run() -> None:
    """The same that `select` tries first, or the reason why not."""
    found = report()
    assert {name.split(",")[0] for name in found.choices} == OPERATIONS
    for name, choice in found.choices.items():
        order = [module.__name__.rsplit(".", 1)[-1] for module in select.candidates(name.split(",")[0])]
        assert choice.name in order
        assert set(order[: order.index(choice.name)]) == set(choice.refused)
        assert all(choice.refused.values())
        assert f"  {name} " in str(found)


def test_weights_of_four_bits_are_asked_about_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[tuple[str, str]] = set()
    explain_prepare = select.explain_prepare
    monkeypatch.setattr(
        select,
        "explain_prepare",
        lambda op, weight: asked.add((op, str(jax.tree.leaves(weight)[0].dtype))) or explain_prepare(op, weight),
    )
    report()
    assert asked == {(op, d) for op in ("quantized_matmul", "grouped_matmul") for d in ("float32", "int8", "int4")}


def test_the_library_that_it_shows_is_the_one_that_runs() -> None:
    if native.library() is None:
        pytest.skip("there is no C++ compiler")
    found = report()
    assert found.library.path is not None
    assert str(found.library.path) == native.library()._name
    assert found.library.size == found.library.path.stat().st_size
    assert found.choices["attention, int8 pages"].name == "cpu"
    assert f"instructions: {native.instructions()}" in str(found)


def test_without_a_compiler_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "loaded", lambda: native.Loaded(error="Install g++"))
    found = report()
    assert found.library == Library(error="Install g++")
    assert "  none: Install g++" in str(found)
    attention = found.choices["attention, float32 pages"]
    assert (attention.name, dict(attention.refused)) == ("xla", {"cpu": "the kernels for CPUs are not there"})
    assert found.choices["quantized_matmul, int4_blockwise"].name == "dequantized"


def test_features_are_whole_words() -> None:
    features = processor_features("x86_64 fpu avx2 avx512_vnni xavx512f")
    assert [name for name, has in features.items() if has] == ["avx2", "avx512_vnni"]


@pytest.mark.slow
def test_the_command_prints_one_json_object() -> None:
    command = [sys.executable, "-m", "jetserve.kernels", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    assert json.loads(done.stdout) == report().as_json()
