"""The files of a batch: prompts in, results out, a JSON object a line.

Owns both formats, and how an interrupted batch goes on. Knows nothing of engines, models or tokenizers.

A prompt is `{"prompt": text or token ids}` or `{"messages": [...]}`, with any field of `SamplingParams` and "priority"
(lower runs first). Its guide is one of `"json_object": true`, `"json_schema": {...}`, `"regex": text` and `"grammar":
text`. A field that is null is as if it were not there. Lines that are blank are skipped.

A result is `{"index", "text", "finish_reason", "usage"}` or `{"index", "error"}`. `index` is the number of the prompt's
line in its file, from 0, blank lines counted; results stand in that order. With logprobs asked for there is "logprobs":
an entry a token, `{"token_id", "token", "logprob", "top": [...]}`. With n > 1 there is "samples", each with its text,
finish_reason and logprobs; the text and finish_reason beside it are those of the first.
"""

import dataclasses
import fcntl
import hashlib
import itertools
import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from jetserve.config import SamplingDefaults
from jetserve.types import Guide, GuideKind, SamplingParams

logger = logging.getLogger(__name__)

DEFAULT_MAX_TOKENS = 256
SAMPLING_FIELDS = tuple(field.name for field in dataclasses.fields(SamplingParams) if field.name != "guide")
FIELDS = ("prompt", "messages", *SAMPLING_FIELDS, *(kind.value for kind in GuideKind), "priority")
JOB_SUFFIX = ".job"
"""Of the file beside the results that says what they were made with."""
_BOM = b"\xef\xbb\xbf"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptLine:
    """A line that is not blank; `index` counts all lines from 0."""

    index: int
    data: bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """What a line asks for: exactly one of `prompt` (text or token ids) and `messages` is there."""

    prompt: str | tuple[int, ...] | None
    messages: list[Any] | None
    sampling: SamplingParams
    priority: int


def default_sampling(defaults: SamplingDefaults) -> SamplingParams:
    """How a prompt is sampled that does not say. Raises ValueError for values out of range."""
    fields = dataclasses.asdict(defaults)
    if defaults.max_tokens is None:
        fields["max_tokens"] = DEFAULT_MAX_TOKENS
    return SamplingParams(**fields)


def read_lines(path: Path) -> Iterator[PromptLine]:
    """The lines of a prompts file that are not blank, one in memory at a time."""
    with path.open("rb") as file:
        for index, data in enumerate(file):
            data = data.removeprefix(_BOM) if index == 0 else data
            if data.strip():
                yield PromptLine(index=index, data=data)


def parse(line: PromptLine, defaults: SamplingParams) -> Prompt:
    """What a line asks for.

    Raises:
      ValueError: naming the line (from 1) and what is wrong with it.
    """
    try:
        return _parse(line.data, defaults)
    except UnicodeDecodeError as error:
        raise ValueError(f"line {line.index + 1}: not UTF-8 at byte {error.start}; save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        raise ValueError(
            f"line {line.index + 1}: not JSON: {error.msg} at column {error.colno}; expected an object such as"
            ' {"prompt": "Hello"}, on one line'
        ) from error
    except RecursionError as error:
        raise ValueError(f"line {line.index + 1}: nested too deeply") from error
    except (ValueError, OverflowError) as error:
        raise ValueError(f"line {line.index + 1}: {error}") from error


def _parse(data: bytes, defaults: SamplingParams) -> Prompt:
    value = json.loads(data.decode("utf-8"))
    if not isinstance(value, dict):
        raise ValueError(f'found {_kind(value)}; expected an object such as {{"prompt": "Hello"}}')
    unknown = [name for name in value if name not in FIELDS]
    if unknown:
        names = ", ".join(repr(name) for name in unknown)
        raise ValueError(f"unknown field {names}; known are {', '.join(FIELDS)}")
    fields = {name: content for name, content in value.items() if content is not None}
    prompt, messages = fields.get("prompt"), fields.get("messages")
    if (prompt is None) == (messages is None):
        found = "neither" if prompt is None else "both"
        raise ValueError(f'found {found} of "prompt" and "messages"; expected exactly one')
    priority = fields.get("priority", 0)
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise ValueError(f"priority is {_kind(priority)}; expected an integer, lower runs first")
    changes: dict[str, Any] = {name: _sampling_value(name, fields[name]) for name in SAMPLING_FIELDS if name in fields}
    changes["guide"] = _guide(fields)
    return Prompt(
        prompt=None if prompt is None else _checked_prompt(prompt),
        messages=None if messages is None else _list("messages", messages),
        sampling=dataclasses.replace(defaults, **changes),
        priority=priority,
    )


def _checked_prompt(prompt: object) -> str | tuple[int, ...]:
    if not isinstance(prompt, (str, list)):
        raise ValueError(f"prompt is {_kind(prompt)}; expected a string or a list of token ids")
    if not prompt:
        raise ValueError("prompt is empty; expected at least one token")
    if isinstance(prompt, str):
        return prompt
    for token in prompt:
        if not isinstance(token, int) or isinstance(token, bool):
            raise ValueError(f"prompt holds {_kind(token)}; a list holds token ids, which are integers")
    return tuple(prompt)


def _sampling_value(name: str, value: object) -> object:
    """JSON's form of a field in `SamplingParams`' own; its range is checked there."""
    if name == "stop":
        if not isinstance(value, (str, list)):
            raise ValueError(f"stop is {_kind(value)}; expected a string or a list of strings")
        return (value,) if isinstance(value, str) else tuple(value)
    if name == "stop_token_ids":
        return tuple(_list(name, value))
    if name == "logit_bias":
        if not isinstance(value, Mapping):
            raise ValueError(f'logit_bias is {_kind(value)}; expected an object such as {{"42": -100}}')
        for key in value:
            if not (key.isascii() and key.isdigit()):
                raise ValueError(f"logit_bias has the key {key!r}; expected token ids of 0 or more")
        return {int(key): bias for key, bias in value.items()}
    return value


_GUIDES = {
    GuideKind.JSON_OBJECT: "true or false",
    GuideKind.JSON_SCHEMA: "an object, the schema",
    GuideKind.REGEX: "a string",
    GuideKind.GRAMMAR: "a string",
}


def _guide(fields: Mapping[str, Any]) -> Guide | None:
    """What one of the fields that are named like the kinds of guides asks for."""
    kinds = [kind for kind in _GUIDES if kind.value in fields]
    if fields.get(GuideKind.JSON_OBJECT.value) is False:
        kinds.remove(GuideKind.JSON_OBJECT)
    if not kinds:
        return None
    if len(kinds) > 1:
        raise ValueError(f"found {' and '.join(kind.value for kind in kinds)}; expected one of them at most")
    match kinds[0], fields[kinds[0].value]:
        case GuideKind.JSON_OBJECT as kind, True:
            return Guide(kind=kind)
        case GuideKind.JSON_SCHEMA as kind, dict() as schema:
            return Guide(kind=kind, source=json.dumps(schema))
        case (GuideKind.REGEX | GuideKind.GRAMMAR) as kind, str() as source:
            return Guide(kind=kind, source=source)
        case kind, value:
            raise ValueError(f"{kind.value} is {_kind(value)}; expected {_GUIDES[kind]}")


def _list(name: str, value: object) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{name} is {_kind(value)}; expected a list")
    return value


def _kind(value: object) -> str:
    """A value for an error: itself if it is short."""
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}…"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Earlier:
    """What an output file holds already: whole results, `failed` of them errors, in the first `size` bytes."""

    results: int
    failed: int
    size: int


def check_paths(prompts: Path | None, output: Path | None) -> tuple[Path, Path]:
    """Both paths, if they can be used.

    Raises:
      ValueError: for a path that is not set, or one path for both.
      OSError: if the prompts cannot be read, or the output's folder is not there.
    """
    if prompts is None:
        raise ValueError("--prompts_file is not set; --task=generate takes a JSON object a line from it")
    if output is None:
        raise ValueError("--output_file is not set; --task=generate writes a JSON object a line to it")
    if not prompts.exists():
        raise FileNotFoundError(f"--prompts_file {prompts} does not exist")
    if not prompts.is_file():
        raise OSError(f"--prompts_file {prompts} is not a regular file; it is read twice, so a pipe will not do")
    if not output.absolute().parent.is_dir():
        raise FileNotFoundError(f"the folder of --output_file {output} does not exist; make it first")
    if output.exists() and not output.is_file():
        raise OSError(f"--output_file {output} is not a regular file; expected a file, or nothing there")
    if output.exists() and output.samefile(prompts):
        raise ValueError(f"--prompts_file and --output_file are both {output}; results would overwrite the prompts")
    return prompts, output


def count_prompts(path: Path) -> int:
    """How many lines are not blank. Raises ValueError if none is."""
    count = sum(1 for _ in read_lines(path))
    if count == 0:
        raise ValueError(f'--prompts_file {path} has no prompts; expected a JSON object a line, {{"prompt": …}}')
    return count


def read_results(output: Path, prompts: Path) -> Earlier:
    """The whole results of an earlier run that was stopped; a last line without its end does not count.

    Raises:
      ValueError: if the file is not what a run over these prompts leaves behind.
    """
    results = failed = size = 0
    lines = read_lines(prompts)
    with output.open("rb") as file:
        for data in file:
            if not data.endswith(b"\n"):
                break
            where = f"line {results + 1} of --output_file {output}"
            line = next(lines, None)
            if line is None:
                raise ValueError(f"{where} is one more than there are prompts in {prompts}; {_OTHER_FILE}")
            result = _result(data, where)
            if result["index"] != line.index:
                raise ValueError(
                    f"{where} has the index {_kind(result['index'])}; expected {line.index}, of the prompt in its"
                    f" place in {prompts}; {_OTHER_FILE}"
                )
            results += 1
            failed += "error" in result
            size += len(data)
    return Earlier(results=results, failed=failed, size=size)


_OTHER_FILE = "it belongs to another batch, or was edited. Name another file, or delete it to start anew"


def _result(data: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not a result, but {data[:40]!r}; {_OTHER_FILE}") from error
    if not isinstance(value, dict) or "index" not in value or not value.keys() & {"text", "error"}:
        raise ValueError(f"{where} is {_kind(value)}, not a result; {_OTHER_FILE}")
    return value


def check_job(output: Path, job: Mapping[str, Any], results: int) -> None:
    """Records what makes the results of `output` what they are, in a file beside it, or checks that it is the same.

    Args:
      output: the results.
      job: by name, whatever a result depends on; strings, numbers and None.
      results: how many are there already, which only the same job may go on after.

    Raises:
      ValueError: naming what differs.
      OSError: if the record cannot be written.
    """
    record = output.with_name(output.name + JOB_SUFFIX)
    if results and record.exists():
        try:
            found = json.loads(record.read_bytes())
        except ValueError as error:
            raise ValueError(f"{record} is not the record of a batch; {_OTHER_FILE}") from error
        changed = [name for name in job if not isinstance(found, dict) or found.get(name) != job[name]]
        if changed:
            was = ", ".join(f"{name} {_kind(found.get(name) if isinstance(found, dict) else None)}" for name in changed)
            now = ", ".join(f"{name} {_kind(job[name])}" for name in changed)
            raise ValueError(
                f"--output_file {output} holds {results} results of another batch: they were made with {was}; this run"
                f" has {now}. Name another file, or delete it and {record.name} to start anew"
            )
        return
    if results:
        logger.warning("%s has no %s beside it: whether its results are of this batch is unknown", output, record.name)
    draft = record.with_name(record.name + ".new")
    draft.write_text(json.dumps(job, indent=1), encoding="utf-8")
    os.replace(draft, record)


def digest_of(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_after(prompts: Path, results: int) -> Iterator[PromptLine]:
    """The prompts that have no result yet."""
    return itertools.islice(read_lines(prompts), results, None)


class ResultFile:
    """Results, each whole on disk or not at all: a line that cannot be written is taken back.

    Held by one process at a time, from before its results are read until it is closed.
    """

    def __init__(self, path: Path) -> None:
        """Opens a file, making it if need be, and changes nothing in it.

        Raises OSError if it cannot be written, or another process holds it.
        """
        self._path = path
        self._size = 0
        try:
            self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0)
        except OSError as error:
            raise OSError(f"cannot write to --output_file {path}: {error.strerror}; name another file") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise OSError(
                f"another run is writing to --output_file {path}; wait for it to end, or name another file"
            ) from error

    def keep(self, size: int) -> None:
        """The first `size` bytes are whole results; what follows is cut off, and results go there."""
        self._size = size
        self._cut()

    def _cut(self) -> None:
        self._file.seek(self._size)
        self._file.truncate()

    def write(self, result: Mapping[str, Any]) -> None:
        """Appends a result, and hands it to the system before it returns.

        Raises:
          OSError: if it cannot be written, a full disk for one; the results before it are whole.
        """
        # Half of a surrogate pair, which JSON's escapes can smuggle in, goes out as the escape that it was.
        line = json.dumps(result, ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace") + b"\n"
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._cut()
            raise OSError(
                f"cannot write to --output_file {self._path}: {error.strerror}. The results in it are whole"
            ) from error
        self._size += len(line)

    def __enter__(self) -> "ResultFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
