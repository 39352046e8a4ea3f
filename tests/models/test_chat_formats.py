"""Chats of every family by its own files, converted: prompts are those of transformers, turns end where they should."""

from pathlib import Path

import pytest
import transformers
from chat_formats import CHAT_FORMATS, MESSAGES
from tiny_models import FAMILIES

from jetserve import default_model
from jetserve.config import EngineConfig, ModelSource
from jetserve.convert import convert
from jetserve.engine.build import build_engine
from jetserve.engine.engine import Engine
from jetserve.testing import make_tiny_checkpoint
from jetserve.types import FinishReason, Request, SamplingParams

CACHE = default_model.default_cache_dir()
CONFIG = EngineConfig(max_sequences=8, max_step_tokens=32)
MUST = 100.0
"""The bias of a token that is always sampled."""


def test_every_family_has_a_format() -> None:
    assert CHAT_FORMATS.keys() == FAMILIES.keys()


@pytest.mark.slow
@pytest.mark.parametrize("model_type", CHAT_FORMATS)
def test_a_turn_ends_where_the_files_say(model_type: str, tmp_path: Path) -> None:
    """Every special token is sampled over and over: those that end a turn are sampled once."""
    chat, source, converted = CHAT_FORMATS[model_type], tmp_path / "source", tmp_path / "converted"
    make_tiny_checkpoint(source, tokenizer=False)  # layers know nothing of tokens, so any model will do
    chat.write(source)
    convert(source, converted, quantize_type="int8_per_channel", progress=lambda work: work)
    engine = build_engine(ModelSource(checkpoint_path=str(converted), cache_dir=CACHE), CONFIG, max_length=256)
    assert {engine.tokenizer.decode([end], skip_special_tokens=False) for end in engine.tokenizer.eos_token_ids} == (
        chat.stops
    )
    prompt = prompt_of(engine, model_type, source)
    for text in chat.special:
        [token] = engine.tokenizer.encode(text, add_special_tokens=False)
        sampling = SamplingParams(temperature=0, max_tokens=3, logit_bias={token: MUST})
        outputs = list(engine.run([Request(request_id=text, prompt_token_ids=prompt, sampling=sampling)]))
        found = [token for output in outputs for token in output.token_ids], outputs[-1].finish_reason
        ends = text in chat.stops
        assert found == ([token] if ends else [token] * 3, FinishReason.STOP if ends else FinishReason.LENGTH)
        assert "".join(output.text for output in outputs) == ""


def prompt_of(engine: Engine, model_type: str, source: Path) -> tuple[int, ...]:
    """The ids of the chat, which must be those of transformers; of a plain text where there are no chats."""
    chat = CHAT_FORMATS[model_type]
    oracle = transformers.PreTrainedTokenizerFast.from_pretrained(source)
    if chat.template is None:
        with pytest.raises(ValueError, match="no chat template"):
            engine.tokenizer.apply_chat_template(MESSAGES)
        found = engine.tokenizer.encode("Hi", add_special_tokens=True)
        assert found == oracle.encode("Hi")
        return tuple(found)
    assert engine.tokenizer.render_chat(MESSAGES) == chat.prompt
    expected = oracle.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert engine.tokenizer.apply_chat_template(MESSAGES) == expected
    return tuple(expected)
