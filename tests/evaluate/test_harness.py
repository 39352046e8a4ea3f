"""lm-eval's tasks by the engine: the very numbers that lm-eval gets of transformers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from jetserve.checkpoint.load import load_model
from jetserve.config import EngineConfig, MeshConfig, TaskSettings
from jetserve.parallel.mesh import make_mesh
from jetserve.testing import make_tiny_checkpoint

pytest.importorskip("lm_eval", reason="the extra eval is not installed")

import jax.numpy as jnp
from lm_eval.api.instance import Instance

from jetserve.evaluate import harness

pytestmark = pytest.mark.slow

CONFIG = EngineConfig(max_sequences=2, max_step_tokens=32, mesh=MeshConfig(tensor=1))
CHOICES = {
    "task": "tiny_choices",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}
ANSWERS = {
    "task": "tiny_answers",
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{choices[0]}}",
    "generation_kwargs": {"until": ["."], "max_gen_toks": 8, "do_sample": False},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def loaded(model: Path) -> Any:
    return load_model(model, mesh=make_mesh(CONFIG.mesh), dtype=jnp.dtype("float32"))


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A folder with two tasks over one file."""
    rng = np.random.default_rng(0)
    words = ["fox", "river", "hill", "sea", "sum", "lines"]
    docs = [
        {"question": f"The {a} is over the {b}", "choices": [f" {a}", f" {b}", " and"], "answer": 1}
        for a, b in rng.choice(words, (6, 2))
    ]
    data = tmp_path / "docs.jsonl"
    data.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    for task in (CHOICES, ANSWERS):
        source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
        (tmp_path / f"{task['task']}.yaml").write_text(json.dumps({**task, **source}))  # JSON is YAML
    return tmp_path


def requests(kind: str, *arguments: tuple) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=each, idx=i) for i, each in enumerate(arguments)]


def test_local_tasks_run_to_their_metrics(loaded: Any, tasks: Path) -> None:
    settings = TaskSettings(tasks=("tiny_choices", "tiny_answers"), include_path=tasks, limit=4)
    found = harness.run_tasks(loaded, CONFIG, settings)
    assert found.keys() == {"tiny_choices", "tiny_answers"}
    assert 0 <= (found["tiny_choices"]["acc"] or 0) <= 1
    assert found["tiny_choices"]["acc_stderr"] is not None
    assert found["tiny_answers"]["exact_match"] is not None


def test_an_unknown_task_is_named(loaded: Any, tasks: Path) -> None:
    with pytest.raises(ValueError, match="has no task no_such_task"):
        harness.run_tasks(loaded, CONFIG, TaskSettings(tasks=("no_such_task",), include_path=tasks))


def test_likelihoods_are_transformers(loaded: Any, model: Path) -> None:
    adapter = harness.EngineModel(loaded, CONFIG, max_length=64)
    pairs = [
        ("The quick brown", " fox jumps over the lazy dog"),
        ("", "Paris"),
        ("the " * 59 + "the", " river and the hill"),
    ]
    found = adapter.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)
    assert adapter.shortened == 1
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for (context, continuation), (total, greedy) in zip(pairs, found, strict=True):
        start = adapter.tok_encode(context) if context else [adapter.eot_token_id]
        tokens = start + adapter.tok_encode(context + continuation)[len(start) if context else 0 :]
        count = len(tokens) - len(start)
        tokens = tokens[-64:]
        with torch.no_grad():
            logits = reference(torch.tensor([tokens])).logits[0, -count - 1 : -1].double()
        target = torch.tensor(tokens[-count:])
        expected = logits.log_softmax(-1)[range(count), target]
        assert total == pytest.approx(float(expected.sum()), abs=1e-3)
        assert greedy == bool((logits.argmax(-1) == target).all())


def test_rolling_takes_every_token_once(loaded: Any) -> None:
    adapter = harness.EngineModel(loaded, CONFIG, max_length=64)
    text = "The fox is over the hill and the river. " * 8
    (whole,) = adapter.loglikelihood_rolling(requests("loglikelihood_rolling", (text,)), disable_tqdm=True)
    tokens = [adapter.eot_token_id, *adapter.tok_encode(text)]
    assert len(tokens) > 64
    long = harness.EngineModel(loaded, CONFIG, max_length=512)
    at_once, _ = long._likelihood(tokens[:1], tokens[1:])
    assert whole == pytest.approx(at_once, rel=0.2)  # later windows see less of the text
    (short,) = adapter.loglikelihood_rolling(requests("loglikelihood_rolling", (text[:80],)), disable_tqdm=True)
    first = adapter.tok_encode(text[:80])
    assert short == pytest.approx(adapter._likelihood([adapter.eot_token_id], first)[0], abs=1e-4)


def test_answers_are_in_order_and_stop(loaded: Any) -> None:
    adapter = harness.EngineModel(loaded, CONFIG, max_length=64)
    settings = {"until": ["e"], "max_gen_toks": 6, "do_sample": False}
    prompts = [f"The {word} is" for word in ("fox", "river", "hill", "sea", "sum")]
    together = adapter.generate_until(
        requests("generate_until", *((prompt, settings) for prompt in prompts)), disable_tqdm=True
    )
    alone = [
        adapter.generate_until(requests("generate_until", (prompt, settings)), disable_tqdm=True)[0]
        for prompt in prompts
    ]
    assert together == alone
    assert not any("e" in text for text in together)


def test_generation_settings() -> None:
    params = harness.sampling_of({"until": "Q:", "temperature": 0.5, "max_new_tokens": 3, "do_sample": True})
    assert (params.stop, params.temperature, params.max_tokens) == (("Q:",), 0.5, 3)
    with pytest.raises(ValueError, match="a task sets beams"):
        harness.sampling_of({"beams": 3})
