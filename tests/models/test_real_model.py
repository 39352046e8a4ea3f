"""The default model against transformers, which reads the same GGUF file, and its answers at several precisions."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import jsonschema
import numpy as np
import pytest
import torch
import transformers

from jetserve.checkpoint.load import LoadedModel, load_model
from jetserve.config import EngineConfig, MeshConfig, ModelSource
from jetserve.engine.build import build_engine
from jetserve.engine.engine import Engine
from jetserve.engine.runner import Runner
from jetserve.parallel.mesh import make_mesh
from jetserve.types import FinishReason, Guide, GuideKind, Request, SamplingParams

pytestmark = pytest.mark.slow

PROMPTS = (
    "What is the capital of France?",
    "Write a short story about a dog that learns to swim.",
    "List three prime numbers.",
    "Explain photosynthesis in one sentence.",
    "Translate 'good morning' into French.",
)
CONFIG = EngineConfig(max_sequences=8, max_length=512, max_step_tokens=256)


@pytest.fixture(scope="module")
def floats(default_gguf: Path) -> LoadedModel:
    """The weights of the file in float32."""
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    return load_model(default_gguf, quantize_type="none", mesh=mesh, dtype=jnp.float32)


@pytest.fixture(scope="module")
def engine(floats: LoadedModel) -> Engine:
    assert floats.tokenizer is not None
    return Engine(Runner(floats.model, CONFIG, make_mesh(MeshConfig(), jax.devices()[:1])), floats.tokenizer)


@pytest.fixture(scope="module")
def oracle(default_gguf: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(
        default_gguf.parent, gguf_file=default_gguf.name, dtype=torch.float32
    ).eval()


def answers(engine: Engine, prompts: tuple[str, ...], max_tokens: int) -> list[tuple[list[int], str]]:
    """Greedy, all prompts at once."""
    requests = [
        Request(
            request_id=str(i),
            prompt_token_ids=tuple(engine.tokenizer.apply_chat_template([{"role": "user", "content": prompt}])),
            sampling=SamplingParams(temperature=0, max_tokens=max_tokens),
        )
        for i, prompt in enumerate(prompts)
    ]
    tokens: list[list[int]] = [[] for _ in prompts]
    texts = [""] * len(prompts)
    for output in engine.run(requests):
        assert output.finish_reason in (None, FinishReason.STOP, FinishReason.LENGTH)
        tokens[int(output.request_id)] += output.token_ids
        texts[int(output.request_id)] += output.text
    return list(zip(tokens, texts, strict=True))


def test_logits(floats: LoadedModel, oracle: transformers.PreTrainedModel, calibration_text: Path) -> None:
    assert floats.tokenizer is not None
    ids = floats.tokenizer.encode(calibration_text.read_text()[:4000], add_special_tokens=False)[:200]
    with torch.no_grad():
        expected = oracle(torch.tensor([ids])).logits[0].numpy()
    runner = Runner(floats.model, CONFIG, make_mesh(MeshConfig(), jax.devices()[:1]))
    found = np.concatenate([np.asarray(logits[:count]) for count, logits in runner.evaluate(ids)])
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < 2e-3


def test_greedy_text(engine: Engine, oracle: transformers.PreTrainedModel) -> None:
    for prompt, (tokens, _) in zip(PROMPTS, answers(engine, PROMPTS, 64), strict=True):
        ids = engine.tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
        expected = oracle.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=64,
            do_sample=False,
            repetition_penalty=1.0,
            eos_token_id=list(engine.tokenizer.eos_token_ids),
        )[0, len(ids) :].tolist()
        assert tokens == expected, prompt


def built(default_gguf: Path, quantize_type: str, cpu_activation: str) -> Engine:
    cache_dir = Path(jax.config.jax_compilation_cache_dir).parent
    source = ModelSource(
        checkpoint_path=str(default_gguf),
        quantize_type=quantize_type,
        cpu_activation=cpu_activation,
        cache_dir=cache_dir,
    )
    return build_engine(source, CONFIG, max_length=256)


@pytest.mark.parametrize("quantize_type", ["none", "int8_per_channel", "int4_blockwise", "keep"])
def test_the_capital_of_france(quantize_type: str, default_gguf: Path) -> None:
    """With exact activations: in floats, "The" leads the next best first token by a logit of 0.09 only."""
    [(_, text)] = answers(built(default_gguf, quantize_type, "float32"), PROMPTS[:1], 32)
    assert "Paris" in text
    if quantize_type == "none":
        assert text == "The capital of France is Paris."


def test_int8_activations_change_logits_by_little(default_gguf: Path) -> None:
    def logits(cpu_activation: str) -> np.ndarray:
        engine = built(default_gguf, "keep", cpu_activation)
        messages = [{"role": "user", "content": " ".join(PROMPTS)}]
        chunks = engine.runner.evaluate(tuple(engine.tokenizer.apply_chat_template(messages)))
        return np.concatenate([np.asarray(part)[:count] for count, part in chunks])

    exact, rounded = logits("float32"), logits("int8")
    assert 0 < (rounded - exact).std() < 0.03 * exact.std()
    assert (rounded.argmax(-1) == exact.argmax(-1)).mean() > 0.9


def test_an_answer_as_json(engine: Engine) -> None:
    schema = {
        "type": "object",
        "properties": {
            "capital": {"type": "string"},
            "country": {"type": "string"},
            "continent": {"enum": ["Africa", "Asia", "Europe"]},
        },
        "required": ["capital", "country", "continent"],
        "additionalProperties": False,
    }
    guides = [
        Guide(kind=GuideKind.JSON_SCHEMA, source=json.dumps(schema)),
        Guide(kind=GuideKind.REGEX, source=r"The capital is [A-Z][a-z]+\."),
    ]
    prompt = [{"role": "user", "content": "What is the capital of France? Answer in JSON."}]
    requests = [
        Request(
            request_id=str(i),
            prompt_token_ids=tuple(engine.tokenizer.apply_chat_template(prompt)),
            sampling=SamplingParams(temperature=0, max_tokens=100, guide=guide),
        )
        for i, guide in enumerate(guides)
    ]
    texts = ["", ""]
    for output in engine.run(requests):
        texts[int(output.request_id)] += output.text
    answer = json.loads(texts[0])
    jsonschema.validate(answer, schema)
    assert (answer["capital"], answer["continent"]) == ("Paris", "Europe")
    assert texts[1] == "The capital is Paris."
