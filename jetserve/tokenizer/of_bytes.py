"""A tokenizer that needs no files: a token for each byte. For models with random weights."""

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jetserve.tokenizer.formats import TokenizerParts
from jetserve.tokenizer.tokenizer import Tokenizer

END = "<|end|>"
CHAT_TEMPLATE = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"


def byte_tokenizer() -> Tokenizer:
    """257 tokens: the bytes, and one that ends a sequence."""
    backend = tokenizers.Tokenizer(models.BPE(vocab=_bytes(), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END])
    return Tokenizer(
        TokenizerParts(
            backend=backend,
            special_tokens={"eos_token": END},
            eos_token_ids=(len(_bytes()),),
            chat_templates={"default": CHAT_TEMPLATE},
        )
    )


def _bytes() -> dict[str, int]:
    return {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
