"""Loading the C++ kernels, and what happens where they cannot be had."""

import logging
import pwd
import shutil
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import pytest

from jetserve.kernels import native, select
from jetserve.kernels.native import builder
from jetserve.quantize.qarray import QuantizationConfig, quantize


@pytest.fixture
def load_again(monkeypatch: pytest.MonkeyPatch) -> Callable[[], native.Loaded]:
    """`native.loaded` as in a process that has not called it yet."""
    monkeypatch.setattr(native, "loaded", native.functools.cache(native.loaded.__wrapped__))
    return lambda: native.loaded()


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(native, "library_folder", lambda: tmp_path)


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a container has it that runs as a user whom it does not know."""

    def nobody(uid: int) -> None:
        raise KeyError(uid)

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)


@pytest.mark.usefixtures("no_compiler", "load_again")
def test_without_kernels_there_is_one_warning_and_other_code_runs(caplog: pytest.LogCaptureFixture) -> None:
    w = quantize(jnp.ones((64, 8)), QuantizationConfig(bits=8))
    with caplog.at_level(logging.WARNING, logger=native.__name__):
        for _ in range(2):
            prepared = select.prepare("quantized_matmul", w)
            y = select.call("quantized_matmul", jnp.ones((2, 64)), prepared)
    assert isinstance(prepared, jnp.ndarray)
    assert jnp.allclose(y, 64, rtol=1e-5)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_folder_that_cannot_be_made_is_told_with_a_way_out(
    tmp_path: Path, load_again: Callable[[], native.Loaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "true")  # answers, and need not do more
    (tmp_path / "file").touch()
    monkeypatch.setattr(native, "library_folder", lambda: tmp_path / "file" / "kernels")
    assert "Set --cache_dir or XDG_CACHE_HOME" in load_again().error


@pytest.mark.usefixtures("homeless")
def test_a_user_without_a_home_is_told_what_to_set(
    load_again: Callable[[], native.Loaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "_cache_dir", None)
    assert "set --cache_dir or XDG_CACHE_HOME" in load_again().error


def test_a_library_that_cannot_be_loaded_is_told_with_the_reason(
    tmp_path: Path, load_again: Callable[[], native.Loaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kernels.so"
    path.write_text("no library")
    monkeypatch.setattr(builder, "build", lambda folder: path)
    assert str(path) in load_again().error
    assert load_again().library is None
