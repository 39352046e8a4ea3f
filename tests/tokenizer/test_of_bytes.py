"""Every byte is a token, so any text comes back."""

import pytest

from jetserve.tokenizer.of_bytes import byte_tokenizer


@pytest.mark.parametrize("text", ["", "plain words", "naïve – 日本 🙂", "\n\t  tabs"])
def test_texts_come_back(text: str) -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=True)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_it_ends_sequences_and_chats() -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.vocab_size == 257
    assert tokenizer.eos_token_ids == (256,)
    assert tokenizer.decode(tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])) == "user: Hi\n"
