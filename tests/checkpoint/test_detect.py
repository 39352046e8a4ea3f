"""Every format is told by what lies at a path; what is not one is listed together with what would be."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from jetserve.checkpoint import base, detect
from jetserve.checkpoint.huggingface import HuggingFaceReader

FOLDERS = {
    "huggingface": [
        ["config.json", "model.safetensors"],
        ["config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors"],
        ["config.json", "model.safetensors", "model.gguf", "params.json", "consolidated.00.pth"],
        ["config.json", "pytorch_model.bin"],
        ["model.safetensors"],
    ],
    "gguf": [["model.gguf"], ["config.json", "model.gguf", "tokenizer.json"]],
    "jetstream": [["params.json", "model.safetensors"], ["params.json", "model.safetensors", "tokenizer.model"]],
    "meta": [["params.json", "consolidated.00.pth", "tokenizer.model"], ["consolidated.00.pth", "consolidated.01.pth"]],
    "native": [["jetserve.json"], ["jetserve.json", "config.json", "model.safetensors"]],
}


def folder_with(folder: Path, names: list[str]) -> Path:
    for name in names:
        (folder / name).touch()
    return folder


@pytest.mark.parametrize(("expected", "names"), [(key, names) for key, group in FOLDERS.items() for names in group])
def test_the_format_of_a_folder(tmp_path: Path, expected: str, names: list[str]) -> None:
    assert detect.format_of(folder_with(tmp_path, names)) == expected


def test_the_format_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").touch()
    assert detect.format_of(tmp_path / "x.gguf") == "gguf"
    blob = tmp_path / "0123abcd"
    blob.write_bytes(b"GGUF" + bytes(8))
    assert detect.format_of(blob) == "gguf"


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ([], ["found an empty folder", "config.json", "*.gguf", "params.json", "jetserve.json"]),
        (["readme.txt"], ["found readme.txt"]),
        (["config.json"], ["found config.json"]),
        (["params.json", "consolidated.safetensors"], ["consolidated.safetensors"]),
        (["a.gguf", "b.gguf"], ["a.gguf, b.gguf", "one of its 2 .gguf files"]),
        ([f"{i}.txt" for i in range(30)], ["and 10 more"]),
    ],
)
def test_other_folders_are_refused(tmp_path: Path, names: list[str], words: list[str]) -> None:
    with pytest.raises(base.CheckpointError) as caught:
        detect.format_of(folder_with(tmp_path, names))
    for word in (str(tmp_path), *words):
        assert word in str(caught.value)


def test_other_paths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(base.CheckpointError, match="no file or folder"):
        detect.open_checkpoint(tmp_path / "nowhere")
    (tmp_path / "x.bin").write_bytes(b"12345")
    with pytest.raises(base.CheckpointError, match="a file of 5 bytes"):
        detect.open_checkpoint(tmp_path / "x.bin")


def test_a_native_checkpoint_is_not_opened_here(tmp_path: Path) -> None:
    with pytest.raises(base.CheckpointError, match="that jetserve wrote"):
        detect.open_checkpoint(folder_with(tmp_path, ["jetserve.json"]))


def test_every_format_opens(tiny, tmp_path: Path) -> None:
    tiny.model.save_pretrained(tmp_path / "huggingface")
    assert isinstance(detect.open_checkpoint(tmp_path / "huggingface"), HuggingFaceReader)

    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "mamba")
    writer.add_tensor("x", np.zeros(4, np.float32))
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()
    with pytest.raises(base.CheckpointError, match="architecture 'mamba'"):
        detect.open_checkpoint(tmp_path / "x.gguf")

    params = json.dumps({"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "norm_eps": 1e-5})
    weights = {name: torch.from_numpy(w.copy()) for name, w in tiny.meta_weights().items()}
    for name in ("meta", "jetstream"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "params.json").write_text(params)
    torch.save(weights, tmp_path / "meta" / "consolidated.00.pth")
    save_file(weights, tmp_path / "jetstream" / "model.safetensors")
    for name in ("huggingface", "meta", "jetstream"):
        reader = detect.open_checkpoint(tmp_path / name, quantize_type="int8_per_channel")
        for key, w in tiny.weights.items():
            np.testing.assert_array_equal(reader.read(key), w)
