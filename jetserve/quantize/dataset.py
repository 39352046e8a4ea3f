"""Calibration text: from a file or a list to windows of tokens, all of one length, so that none of them is padding.

Whatever cannot be used is refused here, before any weight is read. Knows nothing of models.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jetserve.method_config import CalibrationConfig
from jetserve.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

DEFAULT_SAMPLES = 128
DEFAULT_LENGTH = 2048
SHORTEST = 8
"""Tokens of a window."""
TEXT_KEYS = ("text", "prompt", "messages")
EXPECTED = '"text", "prompt" or "messages"'


def calibration_windows(config: CalibrationConfig, tokenizer: Tokenizer, *, max_length: int) -> np.ndarray:
    """Windows spread evenly over a text that is tokenized as one, without special tokens but its own.

    Args:
      config: the text, and how many windows of how many tokens.
      tokenizer: the model's.
      max_length: tokens that the model was made for.

    Returns:
      int32 [samples, length].

    Raises:
      ValueError: for a file that cannot be read or holds no text, and for one too short for what is asked.
    """
    length = config.length or min(DEFAULT_LENGTH, max_length)
    if not SHORTEST <= length <= max_length:
        raise ValueError(
            f"calibration length is {length}; expected {SHORTEST} to {max_length}, what the model was made for"
        )
    where = "the calibration texts" if config.file is None else str(config.file)
    texts = config.texts if config.file is None else read_texts(config.file, tokenizer)
    if not any(text.strip() for text in texts):
        raise ValueError(f"{where} holds no text; expected some, such as articles or chats of the model's own kind")
    ids = np.array([i for text in texts for i in tokenizer.encode(text, add_special_tokens=False)], np.int32)
    if len(ids) < length:
        raise ValueError(
            f"{where} has {len(ids)} tokens, fewer than one sample of {length}; give more text, or lower"
            " --calibration_length"
        )
    if np.all(ids == ids[0]):
        raise ValueError(f"{where} is token {ids[0]} over and over; expected text")
    there = len(ids) // length
    if config.samples is not None and config.samples > there:
        raise ValueError(
            f"{where} has {len(ids)} tokens, enough for {there} samples of {length}, but {config.samples} are asked"
            " for; give more text, or lower --calibration_samples or --calibration_length"
        )
    samples = config.samples or min(DEFAULT_SAMPLES, there)
    if config.samples is None and samples < DEFAULT_SAMPLES:
        logger.warning("%s has text for %d samples only, where %d are usual", where, samples, DEFAULT_SAMPLES)
    chosen = np.linspace(0, there - 1, samples).round().astype(int)
    return ids[: there * length].reshape(there, length)[chosen]


def read_texts(path: Path, tokenizer: Tokenizer) -> list[str]:
    """The texts of a file: its own, or those of its lines or rows if its name ends in .jsonl or .parquet.

    Raises:
      ValueError: if it is not there, not UTF-8, or has a line that is not as expected, naming it.
    """
    if not path.exists():
        raise ValueError(
            f"calibration file {path} does not exist; expected a file of plain text, JSONL or Parquet, or one of a"
            " data set on the hub, owner/name/FILE"
        )
    if path.suffix == ".parquet":
        rows = enumerate(_parquet_rows(path), start=1)
        return [_text_of(row, tokenizer, f"{path}, row {number}") for number, row in rows]
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ValueError(f"calibration file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8: byte {error.object[error.start]:#04x} at offset {error.start}; save it as UTF-8"
        ) from error
    if path.suffix != ".jsonl":
        return [text]
    lines = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
    return [_text_of_line(line, tokenizer, f"{path}, line {number}") for number, line in lines]


def _parquet_rows(path: Path) -> list[Mapping[str, Any]]:
    try:
        import pyarrow.parquet as pq
        from pyarrow import ArrowInvalid
    except ImportError as error:
        raise ValueError(f"{path} takes pyarrow to be read, which is not installed: pip install pyarrow") from error
    try:
        with pq.ParquetFile(path) as file:
            there = file.schema_arrow.names
            rows: list[Mapping[str, Any]] = file.read([name for name in there if name in TEXT_KEYS]).to_pylist()
    except ArrowInvalid as error:
        raise ValueError(f"{path} cannot be read as Parquet: {error}") from error
    if not set(there) & set(TEXT_KEYS):
        raise ValueError(f"{path} has the columns {sorted(there)}; expected {EXPECTED}")
    return rows


def _text_of_line(line: str, tokenizer: Tokenizer, where: str) -> str:
    try:
        data = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON ({error}); expected an object a line") from error
    return _text_of(data if isinstance(data, dict) else {}, tokenizer, where)


def _text_of(fields: Mapping[str, Any], tokenizer: Tokenizer, where: str) -> str:
    for key in ("text", "prompt"):
        if isinstance(fields.get(key), str):
            return fields[key]
    if isinstance(fields.get("messages"), Sequence):
        return tokenizer.render_chat(fields["messages"], add_generation_prompt=False)
    raise ValueError(f"{where} has the keys {sorted(fields)}; expected {EXPECTED}")
