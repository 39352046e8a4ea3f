"""Building the C++ kernels: once, whole or not at all, and what happens where they cannot be built."""

import logging
import shutil
from pathlib import Path

import jax.numpy as jnp
import pytest

from jetserve.kernels import native, select
from jetserve.quantize.qarray import QuantizationConfig, quantize


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)


def test_a_build_is_kept_and_leaves_nothing_else(tmp_path: Path) -> None:
    if native.library() is None:
        pytest.skip("there is no C++ compiler")
    first = native.build(tmp_path)
    written = first.stat().st_mtime_ns
    assert native.build(tmp_path) == first
    assert first.stat().st_mtime_ns == written
    assert list(tmp_path.iterdir()) == [first]


def test_a_build_that_fails_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    if native.library() is None:
        pytest.skip("there is no C++ compiler")
    with pytest.raises(native.BuildError, match="no-such-option"):
        native.build(tmp_path, extra_flags=("-fno-such-option",))
    assert list(tmp_path.iterdir()) == []


def test_without_a_compiler_the_build_names_what_to_install(tmp_path: Path, no_compiler: None) -> None:
    with pytest.raises(native.BuildError, match=r"no C\+\+ compiler .* Install g\+\+"):
        native.build(tmp_path)


def test_without_kernels_there_is_one_warning_and_other_code_runs(
    no_compiler: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = native.functools.cache(native.library.__wrapped__)
    monkeypatch.setattr(native, "library", fresh)
    w = quantize(jnp.ones((64, 8)), QuantizationConfig(bits=8))
    with caplog.at_level(logging.WARNING, logger=native.__name__):
        for _ in range(2):
            prepared = select.prepare("quantized_matmul", w)
            y = select.call("quantized_matmul", jnp.ones((2, 64)), prepared)
    assert isinstance(prepared, jnp.ndarray)
    assert jnp.allclose(y, 64, rtol=1e-5)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
