"""Batches over files: the contract's lines and keys, one bad line among good ones, stops and resumes."""

import json
import re
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jetserve import batch_files, offline
from jetserve.batch_files import ResultFile
from jetserve.config import CacheConfig, EngineConfig, ModelSource, OfflineConfig, SamplingDefaults
from jetserve.default_model import default_cache_dir
from jetserve.engine.build import build_engine
from jetserve.engine.engine import Engine
from jetserve.testing import make_tiny_checkpoint
from jetserve.types import SamplingParams

LIMITS = EngineConfig(max_sequences=2, max_step_tokens=32)
MAX_LENGTH = 64


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """One engine for every test: compiled once."""
    folder = make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
    source = ModelSource(checkpoint_path=str(folder), cache_dir=default_cache_dir())
    return build_engine(source, LIMITS, max_length=MAX_LENGTH)


@pytest.fixture
def loads(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The batch gets that engine, and this list grows whenever it asks for one."""
    found: list[int] = []

    def build(*args: object, **kwargs: object) -> Engine:
        found.append(1)
        return engine

    monkeypatch.setattr(offline, "build_engine", build)
    yield found
    engine.fail("what a batch that stopped left behind")


class Files:
    """A prompts file and an output file, and a batch over them."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.prompts, self.output = folder / "prompts.jsonl", folder / "results.jsonl"
        self._capsys = capsys
        self.code = 0

    def write(self, *lines: object) -> None:
        """Objects as JSON, bytes and strings as they are."""
        data = [line if isinstance(line, bytes) else _text(line).encode() for line in lines]
        self.prompts.write_bytes(b"".join(line + b"\n" for line in data))

    def run(self, **sampling: Any) -> dict[str, Any]:
        """The summary: the last line of standard output."""
        config = OfflineConfig(
            task="generate",
            prompts_file=self.prompts,
            output_file=self.output,
            sampling=SamplingDefaults(**{"max_tokens": 6, **sampling}),
        )
        source = ModelSource(cache_dir=Path("unused"))
        self.code = offline.run(config, source, LIMITS, max_length=MAX_LENGTH)
        lines = self._capsys.readouterr().out.splitlines()
        assert len(lines) == 1, "expected nothing else on standard output"
        return json.loads(lines[-1])

    @property
    def results(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.output.read_text("utf-8").splitlines()]


def _text(line: object) -> str:
    return line if isinstance(line, str) else json.dumps(line)


@pytest.fixture
def files(tmp_path: Path, capsys: pytest.CaptureFixture[str], loads: list[int]) -> Files:
    return Files(tmp_path, capsys)


def prompts(count: int, **fields: object) -> list[dict[str, object]]:
    """Of different lengths, so that they end out of order."""
    return [
        {"prompt": f"the river {i}", "max_tokens": 1 + (7 * i) % 11, "ignore_eos": True, **fields} for i in range(count)
    ]


def test_the_contract_of_results_and_summary(files: Files) -> None:
    files.write({"prompt": "The quick"}, {"messages": [{"role": "user", "content": "Hi"}]}, {"prompt": [5, 6, 7]})
    summary = files.run()
    assert files.code == 0
    assert summary["task"] == "generate"
    assert (summary["requests"], summary["failed"], summary["total"], summary["resumed"]) == (3, 0, 3, 0)
    results = files.results
    assert [result["index"] for result in results] == [0, 1, 2]
    for result in results:
        assert result.keys() == {"index", "text", "finish_reason", "usage"}
        assert result["finish_reason"] in ("stop", "length")
    assert results[2]["usage"]["prompt_tokens"] == 3
    for key in ("prompt_tokens", "output_tokens"):
        assert summary[key] == sum(result["usage"][key] for result in results) > 0
    assert summary["output_tokens_per_second"] == pytest.approx(summary["output_tokens"] / summary["seconds"])


def test_results_stand_in_the_order_of_the_prompts_and_say_what_each_asked_for(files: Files) -> None:
    files.write(*prompts(20))
    files.run()
    results = files.results
    assert [result["index"] for result in results] == list(range(20))
    assert [result["usage"]["output_tokens"] for result in results] == [1 + (7 * i) % 11 for i in range(20)]


def test_a_priority_changes_who_runs_first_but_not_the_order_of_results(files: Files, engine: Engine) -> None:
    files.write(*[{**line, "priority": -i} for i, line in enumerate(prompts(8))])
    files.run()
    assert [result["index"] for result in files.results] == list(range(8))


def test_broken_json_on_line_7_is_the_error_of_that_line_alone(files: Files) -> None:
    lines: list[object] = list(prompts(10))
    lines[6] = '{"prompt": "half'
    files.write(*lines)
    summary = files.run()
    assert files.code == 0
    assert (summary["requests"], summary["failed"]) == (10, 1)
    result = files.results[6]
    assert result.keys() == {"index", "error"}
    assert result["index"] == 6
    assert result["error"].startswith("line 7: ")
    assert all("text" in other for other in files.results if other["index"] != 6)


BAD_LINES: list[tuple[object, str]] = [
    ({"prompt": "a", "max_token": 5}, "unknown field 'max_token'; known are prompt, messages, max_tokens,"),
    ({"prompt": ""}, "prompt is empty"),
    ({"prompt": []}, "prompt is empty"),
    ({"messages": []}, "messages is empty"),
    ({"max_tokens": 3}, "neither"),
    ({"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "both"),
    ({"prompt": 5}, "prompt is 5; expected a string or a list of token ids"),
    ({"prompt": [1, "b"]}, 'prompt holds "b"'),
    ({"prompt": [1, 100000]}, "token id 100000; expected 0 to 319"),
    ({"prompt": [7] * 64}, "has 64 tokens; expected at most 63"),
    ({"prompt": "a", "temperature": "hot"}, "temperature is 'hot'"),
    ({"prompt": "a", "temperature": -1}, "temperature is -1"),
    ('{"prompt": "a", "temperature": NaN}', "temperature is nan"),
    ('{"prompt": "a", "temperature": 1' + "0" * 400 + "}", "line 1: "),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens is 0"),
    ({"prompt": "a", "n": 0}, "n is 0"),
    ({"prompt": "a", "stop": 5}, "stop is 5; expected a string or a list of strings"),
    ({"prompt": "a", "stop": [""]}, "stop is ''"),
    ({"prompt": "a", "stop_token_ids": 5}, "stop_token_ids is 5; expected a list"),
    ({"prompt": "a", "logit_bias": [1]}, "logit_bias is [1]"),
    ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias has the key 'x'"),
    ({"prompt": "a", "logit_bias": {"7": 101}}, "logit_bias[7] is 101"),
    ({"prompt": "a", "priority": "high"}, 'priority is "high"'),
    ({"prompt": "a", "json_object": 1}, "json_object is 1; expected true or false"),
    ({"prompt": "a", "json_schema": "{}"}, 'json_schema is "{}"; expected an object'),
    ({"prompt": "a", "json_schema": {"type": "colour"}}, "Invalid type: colour"),
    ({"prompt": "a", "regex": False}, "regex is false; expected a string"),
    ({"prompt": "a", "regex": "("}, "unclosed group"),
    ({"prompt": "a", "regex": "a", "grammar": "start: A"}, "found regex and grammar; expected one of them"),
    ({"prompt": "a", "guide": "a"}, "unknown field 'guide'"),
    ({"messages": "Hello"}, "messages is"),
    ({"messages": [{"content": "no role"}]}, "role"),
    ('{"prompt": "\\ud800"}', "half of a surrogate pair"),
    ('{"\\ud800": 1}', "unknown field"),
    ([1, 2], "found [1, 2]; expected an object"),
    (b'{"prompt": "\xff"}', "not UTF-8"),
    ("[" * 100_000, "line 1: nested too deeply"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES, ids=[message[:30] for _, message in BAD_LINES])
def test_a_bad_line_gets_an_error_that_says_what_is_wrong(files: Files, line: object, message: str) -> None:
    files.write(line, {"prompt": "good", "max_tokens": 1})
    summary = files.run()
    assert (summary["requests"], summary["failed"]) == (2, 1)
    assert message in files.results[0]["error"]
    assert files.results[0]["error"].startswith("line 1: ")
    assert "text" in files.results[1]


def test_guided_lines(files: Files) -> None:
    settings = {"prompt": "a", "temperature": 1.5, "max_tokens": 60}
    schema = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 1, "maxItems": 2}
    files.write(
        {**settings, "json_schema": {**schema, "x-guidance": {"whitespace_flexible": False}}},
        {**settings, "regex": "[a-c]{5}"},
        {**settings, "grammar": 'start: "x" | "y"+', "json_object": False},
        {**settings, "json_object": True, "max_tokens": 1},
    )
    files.run()
    texts = [result["text"] for result in files.results]
    assert set(json.loads(texts[0])) <= {1, 2}
    assert re.fullmatch("[a-c]{5}", texts[1])
    assert re.fullmatch("x|y+", texts[2])
    assert texts[3] == "{"


def test_more_samples_than_may_wait_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str], engine: Engine) -> None:
    lines = [{"prompt": "a", "n": 100, "max_tokens": 1}, {"prompt": "b", "max_tokens": 1}]
    (tmp_path / "p").write_text("\n".join(map(json.dumps, lines)))
    scheduler = engine.scheduler
    before, scheduler.config = scheduler.config, EngineConfig(**{**vars(scheduler.config), "max_queue": 3})
    try:
        with ResultFile(tmp_path / "r") as results:
            run_batch(engine, tmp_path / "p", results)
    finally:
        scheduler.config = before
    found = [json.loads(line) for line in (tmp_path / "r").read_text().splitlines()]
    assert "n is too large" in found[0]["error"]
    assert "text" in found[1]


def run_batch(engine: Engine, path: Path, results: ResultFile) -> offline.Batch:
    batch = offline.Batch(
        engine, batch_files.read_lines(path), results, SamplingParams(max_tokens=4), offline._progress(0, 0)
    )
    batch.run()
    return batch


def test_sampling_fields_reach_the_request() -> None:
    line = {
        "prompt": "a",
        "stop": "end",
        "stop_token_ids": [3],
        "logit_bias": {"7": -5.5},
        "seed": 9,
        "top_k": None,
        "logprobs": 0,
        "min_tokens": 2,
        "ignore_eos": True,
        "priority": 4,
    }
    defaults = batch_files.default_sampling(SamplingDefaults(top_k=11, temperature=0.5))
    found = batch_files.parse(batch_files.PromptLine(index=0, data=json.dumps(line).encode()), defaults)
    assert found.priority == 4
    assert found.sampling == SamplingParams(
        max_tokens=256,
        temperature=0.5,
        stop=("end",),
        stop_token_ids=(3,),
        logit_bias={7: -5.5},
        seed=9,
        top_k=11,
        logprobs=0,
        min_tokens=2,
        ignore_eos=True,
    )


def test_samples_and_logprobs(files: Files) -> None:
    shared = {"max_tokens": 3, "ignore_eos": True}
    files.write(
        {"prompt": "a", "n": 3, "seed": 1, "temperature": 1.0, **shared}, {"prompt": "a", "logprobs": 2, **shared}
    )
    files.run()
    samples, logprobs = files.results
    assert len(samples["samples"]) == 3
    assert samples["text"] == samples["samples"][0]["text"]
    assert len({sample["text"] for sample in samples["samples"]}) > 1
    assert samples["usage"] == {"prompt_tokens": 1, "output_tokens": 9}
    assert len(logprobs["logprobs"]) == 3
    for entry in logprobs["logprobs"]:
        assert entry.keys() == {"token_id", "token", "logprob", "top"}
        assert [entry["token_id"], entry["logprob"]] == [entry["top"][0]["token_id"], entry["top"][0]["logprob"]]
        assert len(entry["top"]) == 2


def test_indices_count_blank_lines_and_a_byte_order_mark_does_no_harm(files: Files) -> None:
    files.write(b'\xef\xbb\xbf{"prompt": "a"}\r', b"", b"  ", {"prompt": "b"})
    summary = files.run()
    assert (summary["requests"], summary["failed"]) == (2, 0)
    assert [result["index"] for result in files.results] == [0, 3]


@pytest.mark.parametrize("kept", [0, 1, 7, 11, 12])
@pytest.mark.parametrize("tail", ["", '{"index": 11, "text": "ha', "{", '{"index": 0}'])
def test_a_run_that_was_killed_goes_on_where_it_stopped(files: Files, loads: list[int], kept: int, tail: str) -> None:
    lines: list[object] = list(prompts(12))
    lines[3] = "broken"
    files.write(*lines)
    files.run()
    whole = files.output.read_bytes()
    lines_of_it = whole.splitlines(keepends=True)
    files.output.write_bytes(b"".join(lines_of_it[:kept]) + tail.encode())
    loads.clear()
    summary = files.run()
    assert files.output.read_bytes() == whole
    assert (summary["requests"], summary["resumed"], summary["failed"]) == (12, kept, 1)
    assert summary["output_tokens"] == sum(r["usage"]["output_tokens"] for r in files.results[kept:] if "usage" in r)
    assert len(loads) == (kept < 12), "a batch that is complete needs no model"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"index": 1, "text": ""}'], "has the index 1; expected 0"),
        (['{"index": 0, "text": ""}', '{"index": 0, "text": ""}'], "line 2 of .* has the index 0; expected 1"),
        ([f'{{"index": {i}, "text": ""}}' for i in range(4)], "line 4 of .* is one more than there are prompts"),
        (["not a result"], "is not a result, but b'not a result"),
        (['{"prompt": "a"}'], "not a result"),
        (["[]"], "not a result"),
    ],
)
def test_an_output_file_of_something_else_is_refused_and_left_alone(
    files: Files, loads: list[int], lines: list[str], message: str
) -> None:
    files.write(*prompts(3))
    files.output.write_text("".join(line + "\n" for line in lines))
    before = files.output.read_bytes()
    with pytest.raises(ValueError, match=message):
        files.run()
    assert files.output.read_bytes() == before
    assert not loads


def test_files_that_cannot_be_used_are_refused_before_the_model_is_loaded(
    files: Files, loads: list[int], tmp_path: Path
) -> None:
    with pytest.raises(FileNotFoundError, match=r"--prompts_file .* does not exist"):
        files.run()
    for empty in (b"", b"\n  \n"):
        files.prompts.write_bytes(empty)
        with pytest.raises(ValueError, match="has no prompts; expected a JSON object a line"):
            files.run()
    files.write({"prompt": "a"})
    output = files.output
    for path, error, message in (
        (tmp_path / "nowhere" / "out.jsonl", FileNotFoundError, "folder of --output_file .* does not exist"),
        (tmp_path, OSError, "not a regular file"),
        (files.prompts, ValueError, "would overwrite the prompts"),
        (Path("/proc/no.jsonl"), OSError, "cannot write to --output_file /proc/no.jsonl: .*; name another file"),
    ):
        files.output = path
        with pytest.raises(error, match=message):
            files.run()
    files.output = output
    with pytest.raises(ValueError, match="top_p is 0"):
        files.run(top_p=0.0)
    for missing in ("prompts_file", "output_file"):
        paths = {"prompts_file": files.prompts, "output_file": files.output, missing: None}
        with pytest.raises(ValueError, match=f"--{missing} is not set"):
            offline.run(
                OfflineConfig(task="generate", **paths), ModelSource(cache_dir=tmp_path), LIMITS, max_length=None
            )
    assert not loads
    assert not output.exists()


def test_an_unknown_task_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="task is 'train'; expected generate, perplexity or benchmark"):
        offline.run(OfflineConfig(task="train"), ModelSource(cache_dir=tmp_path), LIMITS, max_length=None)


def failing(engine: Engine, fails: Callable[[int], bool]) -> Callable[..., Any]:
    """`engine.runner.run`, which raises in the steps (from 1) that `fails` says."""
    real, count = engine.runner.run, 0

    def run(*args: Any) -> Any:
        nonlocal count
        count += 1
        if fails(count):
            raise RuntimeError(f"step {count} broke")
        return real(*args)

    return run


def test_a_step_that_fails_costs_only_those_that_ran(
    files: Files, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.write(*prompts(8))
    files.run()
    expected = files.results
    files.output.unlink()
    monkeypatch.setattr(engine.runner, "run", failing(engine, lambda count: count == 1))
    summary = files.run()
    assert files.code == 0
    assert summary["failed"] == LIMITS.max_sequences
    for result in files.results[:2]:
        assert result["error"] == f"line {result['index'] + 1}: the engine failed: step 1 broke"
    assert files.results[2:] == expected[2:]


def test_a_batch_stops_when_the_engine_keeps_failing_and_can_go_on(
    files: Files, engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files.write(*prompts(30))
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "run", failing(engine, lambda count: count > 20))
        summary = files.run()
    engine.fail("what the stopped batch left behind")
    assert files.code == 1
    assert "3 times in a row, last with: step 23 broke" in summary["stopped"]
    assert "run the same again to go on" in caplog.text
    stopped_at = summary["requests"]
    assert 0 < stopped_at < 30
    assert len(files.results) == stopped_at
    summary = files.run()
    assert (files.code, summary["requests"], summary["resumed"]) == (0, 30, stopped_at)


def test_ctrl_c_stops_cleanly_and_says_how_to_go_on(
    files: Files, engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files.write(*prompts(30))
    real, count = engine.step, 0

    def step() -> list[Any]:
        nonlocal count
        count += 1
        if count == 15:
            signal.raise_signal(signal.SIGINT)
        return real()

    with monkeypatch.context() as patch:
        patch.setattr(engine, "step", step)
        summary = files.run()
    engine.fail("what the interrupted batch left behind")
    assert files.code == 130
    assert summary["stopped"] == "interrupted"
    assert "run the same again to go on" in caplog.text
    assert summary["requests"] == len(files.results) < 30
    assert files.run()["requests"] == 30


def test_a_second_run_over_the_same_output_is_refused(files: Files) -> None:
    files.write(*prompts(3))
    with ResultFile(files.output) as results:
        results.write({"index": 0, "text": "mine"})
        with pytest.raises(OSError, match="another run is writing to"):
            files.run()
    assert files.results == [{"index": 0, "text": "mine"}]


def test_results_of_another_job_are_not_gone_on_after(files: Files) -> None:
    files.write(*prompts(2))
    files.run()
    before = files.output.read_bytes()
    with pytest.raises(
        ValueError, match=r"2 results of another batch.* temperature 0\.0; this run has temperature 0\.5"
    ):
        files.run(temperature=0.5)
    files.write(*prompts(3))
    with pytest.raises(ValueError, match="2 results of another batch: they were made with prompts"):
        files.run()
    assert files.output.read_bytes() == before
    files.output.unlink()
    assert files.run()["requests"] == 3


def test_a_batch_of_which_every_prompt_failed_is_a_failure(files: Files, caplog: pytest.LogCaptureFixture) -> None:
    files.write("junk", "more junk")
    assert files.run()["failed"] == 2
    assert files.code == 1
    assert "2 of 2 prompts failed" in caplog.text


def test_a_full_disk_leaves_whole_results(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with ResultFile(path) as results:
        results.write({"index": 0, "text": "x" * 50})
        before = path.read_bytes()
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, hard))
        try:
            with pytest.raises(OSError, match=r"cannot write to --output_file .*The results in it are whole"):
                results.write({"index": 1, "text": "y" * 50})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert path.read_bytes() == before
        results.write({"index": 1, "text": "z"})
    assert [json.loads(line)["index"] for line in path.read_text().splitlines()] == [0, 1]


def test_a_batch_that_cannot_write_stops_with_what_it_wrote(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    files.write(*prompts(6))
    real, count = ResultFile.write, 0

    def write(self: ResultFile, result: dict[str, Any]) -> None:
        nonlocal count
        count += 1
        if count == 4:
            raise OSError("cannot write: No space left on device")
        real(self, result)

    monkeypatch.setattr(ResultFile, "write", write)
    summary = files.run()
    assert files.code == 1
    assert summary["requests"] == 3
    assert "No space left" in summary["stopped"]
    assert [result["index"] for result in files.results] == [0, 1, 2]


def test_prompts_are_read_only_as_fast_as_they_are_answered(engine: Engine, tmp_path: Path) -> None:
    """One that takes long holds back all results behind it: then reading stops too."""
    count = 3 * offline.RUN_AHEAD * LIMITS.max_sequences
    lines = [{"prompt": [5], "max_tokens": 60, "ignore_eos": True}] + [{"prompt": [5], "max_tokens": 1}] * count
    (tmp_path / "p").write_text("".join(json.dumps(line) + "\n" for line in lines))
    ahead = 0
    with ResultFile(tmp_path / "r") as results:
        written = read = 0

        def reading() -> Iterator[batch_files.PromptLine]:
            nonlocal read, ahead
            for line in batch_files.read_lines(tmp_path / "p"):
                read += 1
                ahead = max(ahead, read - written)
                yield line

        class Counting:
            def write(self, result: dict[str, Any]) -> None:
                nonlocal written
                written += 1
                results.write(result)

        progress = offline._progress(0, 0)
        offline.Batch(engine, reading(), Counting(), SamplingParams(), progress).run()  # type: ignore[arg-type]
    assert written == count + 1
    assert ahead <= offline.RUN_AHEAD * LIMITS.max_sequences


def test_a_small_cache_gives_the_same_results(
    files: Files, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages for one sequence and a bit: the others are preempted and computed again."""
    files.write(*prompts(10, max_tokens=30))
    files.run()
    whole = files.results
    files.output.unlink()
    small = EngineConfig(max_sequences=2, max_step_tokens=32, cache=CacheConfig(page_size=8, num_pages=9))
    folder = make_tiny_checkpoint(tmp_path / "model")
    source = ModelSource(checkpoint_path=str(folder), cache_dir=default_cache_dir())
    monkeypatch.setattr(offline, "build_engine", lambda *a, **k: build_engine(source, small, max_length=MAX_LENGTH))
    files.run()
    assert files.results == whole
