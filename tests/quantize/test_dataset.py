"""Calibration text: windows of real tokens alone, and every text that is none refused with what to do."""

import json
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet as pq
import pytest

from jetserve.method_config import CalibrationConfig
from jetserve.quantize.dataset import calibration_windows
from jetserve.testing import make_tiny_checkpoint
from jetserve.tokenizer import Tokenizer

TEXT = "The river runs over the hill and into the sea. " * 40


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(make_tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


def test_windows_are_spread_over_the_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    windows = calibration_windows(CalibrationConfig(texts=(TEXT,), samples=3, length=32), tokenizer, max_length=64)
    assert windows.shape == (3, 32)
    last = len(ids) // 32 - 1
    for window, place in zip(windows, (0, round(last / 2), last), strict=True):
        assert window.tolist() == ids[place * 32 : place * 32 + 32]


def test_unset_sizes_fit_the_text_and_the_model(tokenizer: Tokenizer) -> None:
    windows = calibration_windows(CalibrationConfig(texts=(TEXT,)), tokenizer, max_length=64)
    assert windows.shape == (len(tokenizer.encode(TEXT, add_special_tokens=False)) // 64, 64)


def test_a_file_is_read_as_its_lines_say(tokenizer: Tokenizer, tmp_path: Path) -> None:
    lines = [{"text": TEXT}, {"prompt": TEXT}, {"messages": [{"role": "user", "content": TEXT}]}]
    (tmp_path / "data.jsonl").write_text("\n\n".join(map(json.dumps, lines)))
    (tmp_path / "data.txt").write_text(TEXT)
    pq.write_table(pyarrow.table({"text": [TEXT], "other": [b"x"]}), tmp_path / "data.parquet")
    found = [
        calibration_windows(CalibrationConfig(file=tmp_path / name, length=32), tokenizer, max_length=64)
        for name in ("data.txt", "data.jsonl", "data.parquet")
    ]
    np.testing.assert_array_equal(found[0], found[2])
    np.testing.assert_array_equal(found[0][0], found[1][0])
    assert len(found[1]) >= 3 * len(found[0])
    assert 1 in found[1]  # the chat template's own token
    assert 1 not in found[0]


@pytest.mark.parametrize(
    ("texts", "samples", "length", "message"),
    [
        (("",), None, None, "holds no text"),
        ((" \n", "\n"), None, None, "holds no text"),
        (("Short.",), None, 32, "tokens, fewer than one sample of 32"),
        ((TEXT,), 10**6, 32, r"enough for \d+ samples of 32, but 1000000 are asked for"),
        ((TEXT,), None, 65, "length is 65; expected 8 to 64"),
        ((TEXT,), None, 2, "length is 2; expected 8 to 64"),
        (("<|endoftext|>" * 100,), None, 32, "is token 0 over and over"),
    ],
)
def test_texts_that_teach_nothing_are_refused(
    tokenizer: Tokenizer, texts: tuple[str, ...], samples: int | None, length: int | None, message: str
) -> None:
    config = CalibrationConfig(texts=texts, samples=samples, length=length)
    with pytest.raises(ValueError, match=message):
        calibration_windows(config, tokenizer, max_length=64)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("none.txt", None, "does not exist; expected a file of plain text"),
        ("latin.txt", b"caf\xe9 and more", "not UTF-8: byte 0xe9 at offset 3"),
        ("bad.jsonl", b'{"text": "a"}\n{"text": ', "bad.jsonl, line 2 is not JSON"),
        ("other.jsonl", b'{"body": "a"}', r"line 1 has the keys \['body'\]; expected \"text\""),
        ("list.jsonl", b"[1]", "line 1 has the keys"),
        ("bad.parquet", b"text", "bad.parquet cannot be read as Parquet"),
    ],
)
def test_files_that_are_no_text_are_refused(
    tokenizer: Tokenizer, tmp_path: Path, name: str, data: bytes | None, message: str
) -> None:
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=message):
        calibration_windows(CalibrationConfig(file=tmp_path / name), tokenizer, max_length=64)


def test_exactly_one_of_file_and_texts() -> None:
    with pytest.raises(ValueError, match="either a calibration file or texts"):
        CalibrationConfig()
    with pytest.raises(ValueError, match="samples is 0"):
        CalibrationConfig(texts=("a",), samples=0)


def test_a_table_without_texts_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    pq.write_table(pyarrow.table({"body": ["a"]}), tmp_path / "data.parquet")
    with pytest.raises(ValueError, match=r"has the columns \['body'\]; expected \"text\""):
        calibration_windows(CalibrationConfig(file=tmp_path / "data.parquet"), tokenizer, max_length=64)
