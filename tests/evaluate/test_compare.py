"""Models side by side: one row each, the numbers of a perplexity alone, a table and a plot."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from jetserve.config import (
    EngineConfig,
    EvaluateConfig,
    MeshConfig,
    ModelSource,
    OfflineConfig,
    TaskSettings,
)
from jetserve.default_model import default_cache_dir
from jetserve.evaluate import compare, perplexity
from jetserve.evaluate_flags import named
from jetserve.testing import make_tiny_checkpoint

LIMITS = EngineConfig(max_sequences=2, max_step_tokens=32, mesh=MeshConfig(tensor=1))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    model = make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
    return ModelSource(checkpoint_path=str(model), cache_dir=default_cache_dir(), cpu_activation="float32")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("The river is over the hill, and the fox jumps; what is the sum of all the parts?\n" * 5)
    return path


@pytest.mark.slow
def test_every_model_has_a_row_of_its_numbers(source: ModelSource, text: Path, tmp_path: Path, capsys) -> None:
    names = ("none", "int4_blockwise symmetric=False block_size=32", "int4_per_channel")
    sources = {name: named(source, name) for name in names}
    config = EvaluateConfig(
        text_file=text,
        window=48,
        reference_checkpoint=source.checkpoint_path,
        plot=tmp_path / "plot.png",
        output_file=tmp_path / "out.json",
    )
    assert compare.run(config, sources, LIMITS, max_length=None) == 0
    shown = capsys.readouterr()
    rows = json.loads(shown.out.splitlines()[-1])["models"]
    assert json.loads((tmp_path / "out.json").read_text())["models"] == rows
    assert [row["model"] for row in rows] == list(names)
    assert rows[0]["kl_divergence"] == pytest.approx(0, abs=1e-6)
    assert rows[0]["bits_per_weight"] == 32
    assert 0 < rows[1]["kl_divergence"] < rows[2]["kl_divergence"]
    one = OfflineConfig(task="perplexity", text_file=text, window=48)
    alone = perplexity.run(one, sources[names[1]], LIMITS, max_length=None)
    assert rows[1]["perplexity"] == pytest.approx(alone["perplexity"], rel=1e-6)
    assert rows[1]["bits_per_weight"] == alone["bits_per_weight"]
    assert f"{rows[1]['perplexity']:.3f} ± {rows[1]['standard_error']:.3f}" in shown.err
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_the_table_shows_tasks_with_their_errors() -> None:
    row = {
        "model": "none",
        "bits_per_weight": 32.0,
        "bytes": 1e6,
        "tasks": {"arc": {"acc": 0.25, "acc_stderr": 0.01, "em (strict)": 0.5, "em_stderr (strict)": None}},
    }
    table = compare.table_of([row])
    cells = {str(column.header): next(iter(column.cells)) for column in table.columns}
    assert cells == {
        "model": "none",
        "bits a weight": "32.00",
        "MB": "1.0",
        "arc acc": "0.250 ± 0.010",
        "arc em (strict)": "0.500",
    }


@pytest.mark.parametrize(
    ("description", "changes"),
    [
        ("keep", {"quantize_type": "keep"}),
        (
            "int4_blockwise block_size=64 symmetric=False",
            {"quantize_type": "int4_blockwise", "block_size": 64, "symmetric": False},
        ),
        ("some/model quantize_type=none", {"checkpoint_path": "some/model", "quantize_type": "none"}),
    ],
)
def test_models_by_their_words(source: ModelSource, description: str, changes: dict[str, Any]) -> None:
    found = named(source, description)
    for name, value in changes.items():
        assert getattr(found, name) == value


@pytest.mark.parametrize("description", ["", "keep bits=4", "int4_blockwise block_size=x", "none symmetric=maybe"])
def test_words_that_mean_nothing_are_refused(source: ModelSource, description: str) -> None:
    with pytest.raises(ValueError, match="--model"):
        named(source, description)


def test_what_is_missing_is_said_first(
    source: ModelSource, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="neither text_file nor tasks"):
        EvaluateConfig()
    config = EvaluateConfig(text_file=text, output_file=tmp_path / "no" / "out.json")
    with pytest.raises(FileNotFoundError, match=r"out\.json does not exist"):
        compare.run(config, {"x": source}, LIMITS, max_length=None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'jetserve\[eval\]'"):
        compare.run(EvaluateConfig(tasks=TaskSettings(tasks=("x",))), {"x": source}, LIMITS, max_length=None)
