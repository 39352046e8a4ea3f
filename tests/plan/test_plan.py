"""`python -m jetserve.plan`, with the real TPU compiler where something is compiled."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jetserve.plan.chips import find_topology
from jetserve.testing import make_tiny_checkpoint

LAYERS = 4
pytestmark = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
PRESET = ("--model_name=llama-2", "--size=70b", "--quantize_type=none")


def plan(*flags: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, JSON of the last line, and what people see."""
    done = subprocess.run(
        [sys.executable, "-m", "jetserve.plan", *flags], capture_output=True, text=True, timeout=1200, check=False
    )
    lines = done.stdout.splitlines()
    return done.returncode, json.loads(lines[-1]) if lines else {}, done.stderr


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of sizes that fill a TPU's tiles."""
    return make_tiny_checkpoint(
        tmp_path_factory.mktemp("model"),
        hidden_size=1024,
        intermediate_size=2816,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        vocab_size=4096,
        num_hidden_layers=LAYERS,
        dtype="bfloat16",
    )


@pytest.mark.slow
@pytest.mark.parametrize("all_layers", [False, True])
def test_a_checkpoint_on_four_chips(checkpoint: Path, all_layers: bool) -> None:
    code, found, shown = plan(
        f"--checkpoint_path={checkpoint}",
        "--quantize_type=int4_blockwise",
        "--topology=v5e:2x2",
        "--max_cache_length=512",
        "--max_step_tokens=32",
        "--price_per_hour=1.2",
        "--explain",
        f"--all_layers={all_layers}",
    )
    assert code == 0, shown
    assert found["fits"]
    assert (found["devices"], found["chips"]) == (4, 4)
    # 22 blocks over 4 chips are 24, and 2 KV heads are held twice; the rest is shared out to the byte.
    assert found["weights_bytes_per_device"] < 1.12 * found["ideal_weights_bytes_per_device"]
    arguments = found["weights_bytes_per_device"] + found["kv_cache_bytes_per_device"]
    assert arguments <= found["argument_bytes_per_device"] < 1.05 * arguments
    # The last two bring together the best token of each device's part of the vocabulary.
    assert found["collectives"] == {"all-reduce": 2 * LAYERS + 2, "all-gather": 2}
    for key in ("roofline_step_ms", "estimated_step_ms", "tokens_per_second", "dollars_per_million_tokens"):
        assert found[key] > 0
    assert found["largest_batch_size"] > 8
    assert "F / 4 = 768 a device, 256 of zeros" in shown


@pytest.mark.slow
def test_a_published_model_is_shared_out_to_a_few_percent() -> None:
    code, found, shown = plan(
        "--model_name=bloom",
        "--size=176b",
        "--topology=v5p:2x1x1",
        "--quantize_type=int4_blockwise",
        "--max_cache_length=512",
        "--max_step_tokens=32",
    )
    assert code == 0, shown
    assert found["weights_bytes_per_device"] < 1.05 * found["ideal_weights_bytes_per_device"]
    arguments = found["weights_bytes_per_device"] + found["kv_cache_bytes_per_device"]
    assert arguments <= found["argument_bytes_per_device"] < 1.05 * arguments


@pytest.mark.slow
def test_what_does_not_fit_is_told_what_would() -> None:
    code, found, shown = plan(*PRESET, "--topology=v5e:2x4")
    assert code == 1
    assert not found["fits"]
    assert found["needed_bytes_per_device"] > found["hbm_bytes_per_device"]
    assert "does not fit: " in shown
    assert "--quantize_type=int4_blockwise" in shown
    assert "--topology=v5e:4x4" in shown
    assert "--quantize_kv_cache" not in shown.split("would fit")[1]


@pytest.mark.slow
def test_comparison_and_plot(tmp_path: Path) -> None:
    picture = tmp_path / "plans.png"
    code, found, _ = plan(*PRESET[:2], "--compare=none,int8_per_channel", "--topology=v5e:1x1", f"--plot={picture}")
    assert code == 1
    assert [entry["quantize_type"] for entry in found["plans"]] == ["none", "int8_per_channel"]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--topology=v9:2x2",), "expected CHIP:SIZE, of v5e:{1x1,"),
        (("--topology=v5e:3x5",), "which libtpu refuses"),
        (("--tensor_parallelism=3",), "takes 3 devices, but there are 8"),
        (("--max_cache_length=999999",), "the model was made for up to 4096 tokens"),
        (("--compare=int4_blockwise,v5e:2x2",), "expected quantize types"),
        (("--compare=v5e:2x2", "--topology=v5e:2x4"), "name the same thing"),
        (("--plot=a.png",), "--plot shows a comparison"),
    ],
)
def test_bad_input(flags: tuple[str, ...], message: str) -> None:
    code, found, shown = plan(*PRESET, *flags)
    assert code == 1
    assert not found
    assert message in shown


def test_without_the_compiler_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"jetserve\[tpu\]"):
        find_topology("v5e:2x4")
