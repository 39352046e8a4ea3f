"""Types chosen by measured losses: within the size that is asked for, better than one type, and refused below all."""

from pathlib import Path

import pytest

from jetserve import auto
from jetserve.checkpoint.native import NativeCheckpoint
from jetserve.config import ConvertConfig, ModelSource
from jetserve.convert import run
from jetserve.method_config import AutoConfig, CalibrationConfig, GPTQConfig
from jetserve.quantize.recipe import Rule
from jetserve.testing import make_tiny_checkpoint

TEXTS = tuple(f"In the year {n} the river {n % 7} rose over the hill and the sea; what is {n * n}?" for n in range(60))
LINEARS = 14


def config(target_bits: float) -> AutoConfig:
    calibration = CalibrationConfig(texts=TEXTS, samples=4, length=64)
    return AutoConfig(target_bits=target_bits, method=GPTQConfig(calibration=calibration))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights have 64 inputs, but for those of `down`, which no block size divides."""
    return make_tiny_checkpoint(tmp_path_factory.mktemp("hf") / "tiny", intermediate_size=104)


@pytest.mark.slow
def test_a_model_of_the_size_that_was_asked_for(source: Path, tmp_path: Path) -> None:
    rules = auto.choose(source, config(5.4), progress=list).rules
    assert len(rules) == LINEARS
    assert all(rule.block_size is None for rule in rules if "down_proj" in rule.pattern)
    assert len({_form(rule) for rule in rules}) > 2
    wanted = ConvertConfig(
        source=ModelSource(checkpoint_path=str(source), cache_dir=tmp_path), output=tmp_path / "out", method=config(5.4)
    )
    assert run(wanted) == 0
    linears = [entry.report for name, entry in NativeCheckpoint(tmp_path / "out").tensors.items() if "_proj" in name]
    assert len(linears) == LINEARS
    assert 5.0 < sum(tensor.bits for tensor in linears) / sum(tensor.weights for tensor in linears) <= 5.4
    made = {(tensor.name, tensor.type_name, tensor.block_size) for tensor in linears}
    assert made == {(_name(rule), rule.quantize_type, rule.block_size) for rule in rules}


def _name(rule: Rule) -> str:
    return rule.pattern.removeprefix("re:^").removesuffix("$").replace("\\", "")


def _form(rule: Rule) -> tuple[str, int | None, bool | None]:
    return rule.quantize_type, rule.block_size, rule.symmetric


@pytest.mark.slow
def test_ends_of_the_range(source: Path) -> None:
    highest = auto.choose(source, config(9.0), progress=list).rules
    assert {rule.quantize_type for rule in highest} == {"int8_per_channel"}
    with pytest.raises(ValueError, match=r"target bits is 4.0, but .* take 4\.\d+ bits a weight at least"):
        auto.choose(source, config(4.0), progress=list)
