"""Converted checkpoints: a damaged, cut or altered one never loads, and the writer survives what cuts it short."""

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh

from jetserve.checkpoint import native_writer
from jetserve.checkpoint.base import CheckpointError
from jetserve.checkpoint.load import load_model
from jetserve.checkpoint.native import NativeCheckpoint, is_native
from jetserve.checkpoint.native_writer import NativeWriter
from jetserve.config import MeshConfig
from jetserve.convert import convert
from jetserve.parallel.mesh import make_mesh
from jetserve.quantize.qarray import QArray
from jetserve.testing import make_tiny_checkpoint

UP = "model.layers.1.mlp.up_proj.weight"
SETTINGS: dict[str, Any] = {"quantize_type": "int4_blockwise", "block_size": 32, "symmetric": False}


def list_only(work: Any) -> Any:
    return work


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return make_mesh(MeshConfig(), jax.devices()[:1])


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("hf") / "tiny")


@pytest.fixture(scope="module")
def converted(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("native") / "tiny-int4"
    convert(source, output, **SETTINGS, progress=list_only)
    return output


@pytest.fixture
def copy(converted: Path, tmp_path: Path) -> Path:
    return shutil.copytree(converted, tmp_path / "copy")


def edit(folder: Path, change: Callable[[dict], object]) -> None:
    manifest = json.loads((folder / "jetserve.json").read_text())
    change(manifest)
    (folder / "jetserve.json").write_text(json.dumps(manifest))


def entry(manifest: dict, name: str = UP) -> dict:
    return next(tensor for tensor in manifest["tensors"] if tensor["name"] == name)


def load(path: Path, mesh: Mesh, **settings: Any) -> Any:
    return load_model(path, mesh=mesh, dtype=jnp.dtype("float32"), **settings)


def test_it_describes_itself(converted: Path, source: Path) -> None:
    manifest = json.loads((converted / "jetserve.json").read_text())
    assert (manifest["format"], manifest["format_version"]) == ("jetserve", 1)
    assert manifest["hf_config"]["model_type"] == "llama"
    made = {"type": "int4_blockwise", "block_size": 32, "symmetric": False}
    assert manifest["quantization"] == {**made, "rules": None, "method": None}
    assert manifest["source"]["name"] == source.name
    assert manifest["source"]["kind"] == "float"
    up = entry(manifest)
    assert (up["shape"], up["bits"], up["block_size"], up["zero_point"]) == ([64, 128], 4, 32, "integer")
    assert up["error"] == pytest.approx(0.087, rel=0.1)
    assert entry(manifest, "model.norm.weight")["bits"] is None
    assert entry(manifest, "lm_head.weight")["bits"] == 8
    assert not (converted / "progress.json").exists()
    assert is_native(converted)


def test_parts_are_orbax_items(converted: Path) -> None:
    """What is read by TensorStore directly is what Orbax reads."""
    checkpoint = NativeCheckpoint(converted)
    restored = ocp.PyTreeCheckpointer().restore(converted / "weights" / "part-00000")
    found = {item.name: array for item, array in checkpoint.read()}
    assert restored.keys() == found.keys()
    for name, array in found.items():
        if isinstance(array, QArray):
            assert array.values.dtype == np.int8
            np.testing.assert_array_equal(array.values, restored[name]["values"])
            np.testing.assert_array_equal(array.scale, restored[name]["scale"])
        else:
            np.testing.assert_array_equal(array, restored[name]["array"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(format_version=2), "version 2, made by jetserve .* up to version 1"),
        (lambda m: m.update(format="other"), "format 'other'.*expected 'jetserve'"),
        (lambda m: m.update(surprise=1), "has the keys .*surprise"),
        (lambda m: m.pop("hf_config"), "expected .*hf_config"),
        (lambda m: entry(m).update(bits=5), "contradicts itself"),
        (lambda m: entry(m).update(bits="4"), "bits is '4'"),
        (lambda m: entry(m).update(block_size=48), "contradicts itself"),
        (lambda m: entry(m).update(part=1), f"places {UP} in part 1"),
        (lambda m: m["tensors"].append(entry(m)), f"lists {UP} twice"),
        (lambda m: m["tensors"].remove(entry(m)), f"lacks tensors of the model: {UP}"),
        (lambda m: entry(m).update(name="model.strange"), f"lacks tensors of the model: {UP}"),
        (lambda m: m["tensors"].append({**entry(m), "name": "x"}), "has tensors that the model does not: x"),
        (lambda m: entry(m).update(shape=[128, 64]), rf"{UP} has shape \[128, 64\]"),
        (lambda m: entry(m).update(block_size=64), f"{UP} cannot be read.*its values are"),
        (lambda m: entry(m).update(zero_point="none", dtype="float16"), f"{UP} cannot be read.*its scale are"),
        (lambda m: m["quantization"].update(type="int5"), "'int5'"),
    ],
)
def test_an_altered_manifest_is_refused(copy: Path, mesh: Mesh, change: Callable, message: str) -> None:
    edit(copy, change)
    with pytest.raises(CheckpointError, match=message):
        load(copy, mesh)


def test_int8_values_under_an_int4_name_are_refused(source: Path, tmp_path: Path, mesh: Mesh) -> None:
    convert(source, tmp_path / "int8", quantize_type="int8_per_channel", progress=list_only)
    edit(tmp_path / "int8", lambda manifest: entry(manifest).update(bits=4))
    with pytest.raises(ValueError, match=f"{UP} holds values from -1.* int8 tensor under an int4 name"):
        load(tmp_path / "int8", mesh)


def test_parts_missing_or_cut_are_refused_before_reading(copy: Path, converted: Path) -> None:
    part = copy / "weights" / "part-00000"
    largest = max((file for file in part.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    os.truncate(largest, largest.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"part-00000 has \d+ files of \d+ bytes .*expected \d+ of \d+"):
        NativeCheckpoint(copy)
    shutil.rmtree(part)
    with pytest.raises(CheckpointError, match="part-00000 is missing"):
        NativeCheckpoint(copy)


def test_damage_of_the_same_size_is_reported(copy: Path, mesh: Mesh) -> None:
    for file in (copy / "weights").rglob("d/*"):
        file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(CheckpointError, match="is damaged: its files have SHA-256"):
        load(copy, mesh)


def test_an_unreadable_manifest_is_reported(copy: Path) -> None:
    (copy / "jetserve.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"jetserve\.json is not JSON"):
        NativeCheckpoint(copy)


@pytest.mark.parametrize("settings", [{}, SETTINGS, {"quantize_type": "keep"}, {"block_size": 32}])
def test_settings_that_agree_are_fine(converted: Path, mesh: Mesh, settings: dict) -> None:
    assert load(converted, mesh, **settings).quantize_type == "int4_blockwise"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"quantize_type": "int8_per_channel"},
            "quantize_type is int8_per_channel, but .* quantize_type int4_blockwise",
        ),
        ({"quantize_type": "none"}, "quantize_type is none, but .* quantize_type int4_blockwise"),
        ({"block_size": 64}, "block_size is 64, but .* block_size 32"),
        ({"symmetric": True}, "symmetric is True, but .* symmetric False"),
    ],
)
def test_settings_that_contradict_are_refused_naming_both(
    converted: Path, mesh: Mesh, settings: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load(converted, mesh, **settings)


def test_quantized_activations_are_of_linears_only_and_take_quantized_weights(
    converted: Path, source: Path, tmp_path: Path, mesh: Mesh
) -> None:
    loaded = load(converted, mesh, quantize_activation=True)
    assert loaded.model.layers[0].mlp.up.weight.get_value().quantize_activation
    convert(source, tmp_path / "none", progress=list_only)
    with pytest.raises(ValueError, match="quantize_activation takes quantized weights"):
        load(tmp_path / "none", mesh, quantize_activation=True)


class Killed(BaseException):
    """As abrupt as can be from within."""


def killed_after(count: int) -> Callable:
    def progress(work: Any) -> Iterator:
        for index, item in enumerate(work):
            if index == count:
                raise Killed
            yield item

    return progress


def contents(folder: Path) -> list:
    return [
        (item.name, *(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(array)))
        for item, array in NativeCheckpoint(folder).read()
    ]


def test_killed_and_resumed_is_the_same_as_at_once(
    source: Path, converted: Path, tmp_path: Path, mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_writer, "PART_BYTES", 30_000)
    output, partial = tmp_path / "out", tmp_path / "out.partial"
    with pytest.raises(Killed):
        convert(source, output, **SETTINGS, progress=killed_after(9))
    assert not output.exists()
    with pytest.raises(CheckpointError, match="unfinished conversion; run the same conversion again"):
        load(partial, mesh)
    (partial / "weights" / "part-00009.orbax-checkpoint-tmp").mkdir()
    report = convert(source, output, **SETTINGS, progress=list_only)
    assert 0 < report.resumed <= 9
    assert not partial.exists()
    assert len(NativeCheckpoint(output).manifest.parts) > 3
    assert not list(output.rglob("*tmp*"))
    assert contents(output) == contents(converted)


def test_killed_before_the_last_act_is_finished_by_the_next_run(
    source: Path, converted: Path, tmp_path: Path, mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename_anything = os.rename

    def rename(old: Any, new: Any) -> None:
        if Path(new) == tmp_path / "out":
            raise Killed
        rename_anything(old, new)

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", rename)
        with pytest.raises(Killed):
            convert(source, tmp_path / "out", **SETTINGS, progress=list_only)
    with pytest.raises(CheckpointError, match="unfinished"):
        load(tmp_path / "out.partial", mesh)
    report = convert(source, tmp_path / "out", **SETTINGS, progress=list_only)
    assert report.resumed == len(report.weights.tensors)
    assert contents(tmp_path / "out") == contents(converted)


@pytest.mark.parametrize("other", [{"quantize_type": "int8_per_channel"}, {**SETTINGS, "symmetric": True}])
def test_a_partial_of_other_settings_is_discarded(
    source: Path, tmp_path: Path, other: dict, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native_writer, "PART_BYTES", 30_000)
    with pytest.raises(Killed):
        convert(source, tmp_path / "out", **SETTINGS, progress=killed_after(9))
    report = convert(source, tmp_path / "out", **other, progress=list_only)
    assert report.resumed == 0
    assert "discarding" in caplog.text
    assert report.quantize_type == other["quantize_type"]
    assert len(contents(tmp_path / "out")) == len(report.weights.tensors)


@pytest.mark.parametrize("damage", ["{", '{"digest": 1}', None])
def test_a_damaged_partial_is_discarded(
    source: Path, tmp_path: Path, damage: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_writer, "PART_BYTES", 30_000)
    with pytest.raises(Killed):
        convert(source, tmp_path / "out", **SETTINGS, progress=killed_after(9))
    if damage is None:
        shutil.rmtree(tmp_path / "out.partial" / "weights" / "part-00000")
    else:
        (tmp_path / "out.partial" / "progress.json").write_text(damage)
    assert convert(source, tmp_path / "out", **SETTINGS, progress=list_only).resumed == 0


def test_two_processes_do_not_write_the_same_output(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    other = os.open(tmp_path / "out.partial", os.O_RDONLY)
    try:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match="another process is converting to"):
            convert(source, tmp_path / "out", **SETTINGS, progress=list_only)
    finally:
        os.close(other)


def test_an_output_that_exists_is_refused_before_the_source_is_opened(converted: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="exists already"):
        convert(tmp_path / "no source", converted, **SETTINGS)


def test_a_small_disk_is_refused_with_numbers(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type(shutil.disk_usage(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9, 1_000_000))
    with pytest.raises(CheckpointError, match=r"has 1\.0 MB free; converting needs about \d+\.\d MB"):
        convert(source, tmp_path / "out", **SETTINGS, progress=list_only)


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    folder.mkdir()
    options = f"size={size}"
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("mounting a small disk takes root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_keeps_what_was_finished(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_writer, "PART_BYTES", 20_000)
    monkeypatch.setattr(NativeWriter, "check_space", lambda *_: None)
    with small_disk(tmp_path / "disk", "400k") as disk:
        with pytest.raises(CheckpointError, match=r"the disk is full: .* tensors are finished; free some space"):
            convert(source, disk / "out", quantize_type="none", progress=list_only)
        subprocess.run(["mount", "-o", "remount,size=20m", disk], check=True)
        report = convert(source, disk / "out", quantize_type="none", progress=list_only)
        assert report.resumed > 0
        assert len(contents(disk / "out")) == len(report.weights.tensors)
