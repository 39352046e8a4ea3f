"""Guides over vocabularies: what tokens spell, what they lack, and what requests share."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from engine_parts import (
    LENGTH,
    PLAIN,
    VOCABULARY,
    answers_of,
    checkpoint,
    guided,
    make_engine,
    requests_of,
    run,
    runner_of,
    tokenizer,
)
from llguidance import LLParserLimits

from jetserve.engine import guided as guided_module
from jetserve.engine.engine import Engine
from jetserve.engine.guided import Guides, Matcher, fill_masks
from jetserve.testing import make_tiny_checkpoint
from jetserve.tokenizer import Tokenizer
from jetserve.types import FinishReason, Guide, GuideKind


def test_ids_that_the_tokenizer_lacks_never_come(tmp_path: Path) -> None:
    smaller = Tokenizer.from_folder(make_tiny_checkpoint(tmp_path, vocab_size=300))
    engine = Engine(runner_of(PLAIN, max_length=LENGTH), smaller)
    padding = dict.fromkeys(range(300, VOCABULARY), 100.0)
    requests = [
        dataclasses.replace(request, prompt_token_ids=tuple(token % 300 for token in request.prompt_token_ids))
        for request in requests_of(guided(GuideKind.REGEX, r"[^\n]{9}", logit_bias=padding), 4)
    ]
    for answer in run(engine, requests).values():
        assert re.fullmatch(r"[^\n]{9}", answer.text)
        assert max(answer.tokens) < 300


def test_without_an_end_of_sequence_there_are_no_guides() -> None:
    endless = Tokenizer.from_folder(checkpoint())
    endless.eos_token_ids = ()
    engine = Engine(runner_of(PLAIN, max_length=LENGTH), endless)
    engine.guides.warm_up()
    with pytest.raises(ValueError, match="no end of sequence"):
        engine.prepare(requests_of(guided(GuideKind.JSON_OBJECT), 1)[0])


def says(tokenizer: Tokenizer, guide: Guide, seed: int) -> list[int]:
    """Tokens drawn evenly from those that may come, up to the end."""
    rng = np.random.default_rng(seed)
    matcher, tokens = Matcher(Guides(tokenizer, tokenizer.vocab_size), guide), []
    while not matcher.is_complete:
        mask = np.zeros((1, -(-tokenizer.vocab_size // 32)), np.uint32)
        fill_masks({0: matcher}, mask)
        assert matcher.error is None
        tokens.append(int(rng.choice(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")))))
        matcher.advance(tokens[-1])
    return tokens


def train(folder: Path, **settings: Any) -> tuple[Tokenizer, Any]:
    """A small tokenizer, and SentencePiece's own of the same model."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["bcd bcd bcd bcd ab ab x y", "and so it is said that bcd is not ab"] * 20),
        model_prefix=str(folder / "tokenizer"),
        minloglevel=2,
        byte_fallback=True,
        vocab_size=320,
        hard_vocab_limit=False,
        **settings,
    )
    oracle = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    return Tokenizer.from_folder(folder), oracle


@pytest.mark.parametrize(
    "kind",
    [{"model_type": "bpe"}, {"model_type": "unigram"}, {"model_type": "bpe", "add_dummy_prefix": False}],
    ids=["bpe", "unigram", "no prefix"],
)
def test_what_must_come_is_written_as_the_model_learnt_it(tmp_path: Path, kind: dict[str, Any]) -> None:
    """SentencePiece puts a space before every text that it is given, which the middle of an answer does not have."""
    trained, oracle = train(tmp_path, **kind, normalization_rule_name="identity", remove_extra_whitespaces=False)
    for middle in (" bcd is that", "abcd and ab", "é"):
        guide = Guide(kind=GuideKind.REGEX, source=f"[xy]{middle}[.]")
        tokens = says(trained, guide, seed=len(middle))
        text = b"".join(trained.token_text(token) for token in tokens).decode()
        assert re.fullmatch(guide.source, text)
        said = tokens[1:-1]  # less the letter and the full stop
        assert said == oracle.encode(text[:-1])[-len(said) :]


def test_what_the_tokenizer_would_change_comes_all_the_same(tmp_path: Path) -> None:
    trained, oracle = train(tmp_path, model_type="unigram")  # makes one space of two, and plain letters of wide ones
    text = "ab  and\nａｂ, bcd"
    assert oracle.decode(oracle.encode(text)) != text
    tokens = says(trained, Guide(kind=GuideKind.REGEX, source=text), seed=0)
    assert b"".join(trained.token_text(token) for token in tokens).decode() == text


def test_an_end_of_sequence_is_no_text_whatever_it_spells() -> None:
    odd = Tokenizer.from_folder(checkpoint())
    (end,) = odd.encode("e", add_special_tokens=False)
    odd.eos_token_ids = (end,)
    engine = Engine(runner_of(PLAIN, max_length=LENGTH), odd)
    for answer in answers_of(guided(GuideKind.REGEX, "[d-f]{20}", logit_bias={end: 100.0}), 4, engine):
        assert re.fullmatch("[d-f]{20}", answer.text)


class Lacking(Tokenizer):
    """One without any token that has a "q" or a "z"."""

    def has_token(self, token_id: int) -> bool:
        return super().has_token(token_id) and not {*b"qz"} & {*self.token_text(token_id)}


@pytest.mark.parametrize("pattern", ["[ab]{3}[qz]", "[ab]{3}(z|zy)c", "[ab]{3}z+[a-z]{3}"])
def test_what_the_vocabulary_cannot_say_ends_with_an_error(pattern: str) -> None:
    engine = Engine(runner_of(PLAIN, max_length=LENGTH), Lacking.from_folder(checkpoint()))
    for answer in answers_of(guided(GuideKind.REGEX, pattern), 2, engine):
        assert answer.reason is FinishReason.GUIDE
        assert "cannot go on as its regex asks" in answer.last.error
        assert re.fullmatch("[ab]{3}", answer.text)
    for answer in answers_of(guided(GuideKind.REGEX, "[ab]{3}[qyz]"), 2, engine):
        assert (answer.reason, answer.text[3]) == (FinishReason.STOP, "y")
    with pytest.raises(ValueError, match="no token of the vocabulary can come next"):
        engine.prepare(requests_of(guided(GuideKind.REGEX, "[qz]"), 1)[0])


def test_the_guides_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guided_module, "MAX_COMPILED", 2)
    engine = make_engine(max_length=LENGTH)
    first, second, third = (requests_of(guided(GuideKind.REGEX, source), 1)[0] for source in ("a", "b", "c"))
    for request in (first, second, first, third):
        engine.prepare(request)
    assert [engine.is_prepared(request) for request in (first, second, third)] == [True, False, True]
    assert run(engine, [second])["g0", 0].text == "b"


@pytest.mark.slow
def test_a_lexer_that_others_have_filled_is_left_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests with one guide share the states that they find, of which there is a limit."""
    limits = LLParserLimits(max_lexer_states=1500, verbose_errors=False)
    monkeypatch.setattr(guided_module, "LIMITS", limits)
    restarts = []
    renew = Guides.renew
    monkeypatch.setattr(Guides, "renew", lambda *args: restarts.append(args) or renew(*args))
    pattern = "[ab]*a[ab]{120}c"
    answers = answers_of(
        guided(GuideKind.REGEX, pattern, logit_bias={tokenizer().encode("c", add_special_tokens=False)[0]: 9.0}), 24
    )
    assert restarts
    for answer in answers:
        assert answer.reason is FinishReason.STOP
        assert re.fullmatch(pattern, answer.text)
