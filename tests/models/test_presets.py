"""Presets have the numbers of parameters that their authors, or the files of their checkpoints, tell."""

import math

import pytest

from jetserve.models import base
from jetserve.models.presets import PRESETS, preset

PUBLISHED = {
    "llama-2": {"7b": 6_738_415_616, "13b": 13_015_864_320, "70b": 68_976_648_192},
    "llama-3": {"8b": 8_030_261_248, "70b": 70_553_706_496},
    "llama-3.1": {"8b": 8_030_261_248, "70b": 70_553_706_496, "405b": 405_853_388_800},
    "llama-3.2": {"1b": 1_235_814_400, "3b": 3_212_749_824},
    "mistral": {"7b": 7_241_732_096},
    "mixtral": {"8x7b": 46_702_792_704},
    "gemma": {"2b": 2_506_172_416, "7b": 8_537_680_896},
    "gemma-2": {"2b": 2_614_341_888, "9b": 9_241_705_984, "27b": 27_227_128_320},
    "gemma-3": {"1b": 999_885_952},
    "qwen2.5": {
        "0.5b": 494_032_768,
        "1.5b": 1_543_714_304,
        "3b": 3_085_938_688,
        "7b": 7_615_616_512,
        "14b": 14_770_033_664,
        "32b": 32_763_876_352,
        "72b": 72_706_203_648,
    },
    "qwen3": {
        "0.6b": 596_049_920,
        "1.7b": 1_720_574_976,
        "4b": 4_022_468_096,
        "8b": 8_190_735_360,
        "14b": 14_768_307_200,
        "32b": 32_762_123_264,
        "30b-a3b": 30_532_122_624,
    },
    "opt": {
        "125m": 125_239_296,
        "1.3b": 1_315_758_080,
        "2.7b": 2_651_596_800,
        "6.7b": 6_658_473_984,
        "13b": 12_853_473_280,
        "30b": 29_974_540_288,
    },
    "bloom": {
        "560m": 559_214_592,
        "1b1": 1_065_314_304,
        "1b7": 1_722_408_960,
        "3b": 3_002_557_440,
        "7b1": 7_069_016_064,
        "176b": 176_247_271_424,
    },
}
"""Tied weights counted once."""


def test_every_preset_has_a_published_count() -> None:
    assert {name: set(sizes) for name, sizes in PRESETS.items()} == {
        name: set(sizes) for name, sizes in PUBLISHED.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), [(name, size) for name, sizes in PRESETS.items() for size in sizes])
def test_parameters_are_as_many_as_published(name: str, size: str) -> None:
    hf = preset(name, size)
    module = base.find(hf["model_type"])
    parameters = base.parameters(module.Model(module.Config.from_hf(hf)), module.WEIGHTS)
    assert sum(math.prod(parameter.shape) for parameter in parameters) == PUBLISHED[name][size]


def test_what_is_not_listed_is_refused() -> None:
    with pytest.raises(ValueError, match=r"name is 'gpt-5'; expected one of llama-2, "):
        preset("gpt-5", "1b")
    with pytest.raises(ValueError, match=r"size of llama-2 is '8b'; expected one of 7b, 13b, 70b"):
        preset("llama-2", "8b")
