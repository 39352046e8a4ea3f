"""A tiny engine, and a chat over it that must leave nothing behind."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from chat_parts import CONFIG, LIMIT, Screen, cache_dir, make_chat, make_endless

from jetserve.config import ModelSource
from jetserve.engine.build import build_engine
from jetserve.engine.engine import Engine
from jetserve.interactive.chat import Chat
from jetserve.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_endless(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Engine:
    source = ModelSource(checkpoint_path=str(checkpoint), cache_dir=cache_dir())
    return build_engine(source, CONFIG, max_length=LIMIT)


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_folder(checkpoint)


@pytest.fixture
def screen() -> Screen:
    return Screen()


@pytest.fixture
def chat(engine: Engine, screen: Screen) -> Iterator[Chat]:
    yield make_chat(engine, screen)
    assert not engine.has_work
    assert engine.stats().pages_used == 0
