"""What is forgotten of a conversation that outgrows its limit, and what is not."""

import pytest

from jetserve.interactive.conversation import Conversation, Turn
from jetserve.tokenizer import Tokenizer


def test_the_oldest_turns_go_and_the_system_message_stays(tokenizer: Tokenizer) -> None:
    conversation = Conversation(tokenizer, limit=160, reserve=40, system="Be brief.")
    forgotten = 0
    for i in range(8):
        tokens, dropped = conversation.prompt(f"Question {i}")
        forgotten += dropped
        text = tokenizer.decode(tokens, skip_special_tokens=False)
        assert len(tokens) + 40 <= 160
        assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>")
        assert text.endswith(f"user\nQuestion {i}<|im_end|>\n<|im_start|>assistant\n")
        conversation.add(Turn(user=f"Question {i}", assistant=f"Answer {i}"))
        # As few as will do, and the oldest.
        assert [turn.user for turn in conversation.turns] == [f"Question {j}" for j in range(forgotten, i + 1)]
    assert 0 < forgotten < 7


def test_a_message_too_long_leaves_the_history_alone(tokenizer: Tokenizer) -> None:
    conversation = Conversation(tokenizer, limit=100, reserve=20)
    conversation.add(Turn(user="Hello", assistant="Hi"))
    alone = len(tokenizer.apply_chat_template([{"role": "user", "content": "word " * 50}]))
    with pytest.raises(ValueError, match=f"takes {alone} tokens.* at most 99 fit"):
        conversation.prompt("word " * 50)
    assert len(conversation.turns) == 1


def test_a_long_last_message_takes_the_room_of_the_answer(tokenizer: Tokenizer) -> None:
    length = len(tokenizer.apply_chat_template([{"role": "user", "content": "word " * 20}]))
    conversation = Conversation(tokenizer, limit=length + 1, reserve=30)
    conversation.add(Turn(user="Hello", assistant="Hi"))
    tokens, dropped = conversation.prompt("word " * 20)
    assert (len(tokens), dropped) == (length, 1)
