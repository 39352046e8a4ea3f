"""Text to token ids and back, for every tokenizer that checkpoints carry.

Owns the `Tokenizer`: loading it from a folder or a GGUF file, saving it, encoding, decoding and chat prompts. Knows
nothing of models or of how tokens are generated. Text streamed token by token is `detokenizer.py`'s job.
"""

import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import tokenizers

from jetserve.tokenizer import chat_template
from jetserve.tokenizer.detokenizer import IncrementalDetokenizer
from jetserve.tokenizer.folder import CONFIG_FILE, read_folder
from jetserve.tokenizer.formats import TokenizerParts
from jetserve.tokenizer.from_gguf import read_gguf
from jetserve.tokenizer.token_bytes import to_bytes

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


LONG_TEXT = 10_000
"""Characters from which encoding takes milliseconds."""


def _ids(backend: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """The ids of a text. Of several texts at once the library lets other threads run meanwhile, of a single one not."""
    if len(text) < LONG_TEXT:
        return backend.encode(text, add_special_tokens=add_special_tokens).ids
    return backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


class Tokenizer:
    """One model's tokenizer. Immutable; safe to use from several threads.

    `eos_token_ids` holds every id that ends a sequence, the main one first. Ids run from 0 up to `vocab_size` - 1.
    Decoding is by bytes: the text is the tokens' bytes, one after the other, read as UTF-8 with U+FFFD for what is not.
    It is never tidied up (Hugging Face's `clean_up_tokenization_spaces`): a streamed text and a whole one agree.
    """

    def __init__(self, parts: TokenizerParts) -> None:
        self._backend = parts.backend
        # A tokenizer.json may ask for these; they would cut prompts or fill them up, without a word.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._texts = {index: text for text, index in self._backend.get_vocab(with_added_tokens=True).items()}
        self._special_tokens = dict(parts.special_tokens)
        for name, text in self._special_tokens.items():
            if self._backend.token_to_id(text) is None:
                raise ValueError(f"{name} is {text!r}, which is not in the vocabulary; correct {CONFIG_FILE}")
        self._mark_special(self._special_tokens.values())
        added = self._backend.get_added_tokens_decoder()
        self._special_ids = frozenset(index for index, token in added.items() if token.special)
        self._layout = _decoder_layout(self._backend)
        self._chat_templates = dict(parts.chat_templates)
        self.vocab_size: int = max(self._texts) + 1
        self.eos_token_ids: tuple[int, ...] = tuple(parts.eos_token_ids)
        for index in self.eos_token_ids:
            self._check_id(index, "the end of sequence token")

    def _mark_special(self, texts: Iterable[str]) -> None:
        added = self._backend.get_added_tokens_decoder().values()
        special = {token.content for token in added if token.special}
        self._backend.add_special_tokens([text for text in dict.fromkeys(texts) if text not in special])

    @classmethod
    def from_folder(cls, path: str | Path) -> "Tokenizer":
        """The tokenizer of a Hugging Face folder, of a lone `tokenizer.model`, or of a folder that `save` wrote.

        Raises FileNotFoundError when there is none, ValueError when a file is malformed.
        """
        return cls(read_folder(Path(path)))

    @classmethod
    def from_gguf(cls, reader: gguf.GGUFReader) -> "Tokenizer":
        """The tokenizer in a GGUF file's metadata. Raises ValueError when it is missing or of an unknown kind."""
        return cls(read_gguf(reader))

    def save(self, folder: str | Path) -> None:
        """Writes `tokenizer.json` and `tokenizer_config.json`; `from_folder` and Hugging Face's tools read them."""
        config: dict[str, object] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **self._special_tokens,
            "eos_token_ids": list(self.eos_token_ids),
        }
        if set(self._chat_templates) == {"default"}:
            config["chat_template"] = self._chat_templates["default"]
        elif self._chat_templates:
            config["chat_template"] = [{"name": n, "template": text} for n, text in self._chat_templates.items()]
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._backend.save(str(folder / "tokenizer.json"))
        (folder / CONFIG_FILE).write_text(json.dumps(config, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tokenizer):
            return NotImplemented
        return (
            self.eos_token_ids == other.eos_token_ids
            and self._special_tokens == other._special_tokens
            and self._chat_templates == other._chat_templates
            and _comparable(self._backend) == _comparable(other._backend)
        )

    __hash__ = None  # type: ignore[assignment]

    @property
    def bos_token_id(self) -> int | None:
        """The id that starts a sequence; None where the model has none."""
        text = self._special_tokens.get("bos_token")
        return None if text is None else self._backend.token_to_id(text)

    @property
    def leading_spaces_stripped(self) -> int:
        """How many spaces at the start of a decoded text belong to the encoding (SentencePiece's dummy prefix)."""
        return self._layout[1]

    def has_token(self, token_id: int) -> bool:
        """Whether this id is a token's: a model's vocabulary may be larger."""
        return token_id in self._texts

    def is_special(self, token_id: int) -> bool:
        """Whether this token is markup: hidden by `skip_special_tokens`, never made of plain text."""
        return token_id in self._special_ids

    def encode(self, text: str, *, add_special_tokens: bool, parse_special: bool = True) -> list[int]:
        """The token ids of `text`; `add_special_tokens` puts around it what the model expects, mostly bos.

        `parse_special` reads the text of special tokens ("<|im_end|>") as those tokens; without it, it is plain text.
        Raises ValueError for text that is not valid Unicode.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the text has half of a surrogate pair, {text[error.start]!r}, at index {error.start}; "
                "expected valid Unicode"
            ) from error
        if not parse_special and not self._special_ids.isdisjoint(_ids(self._backend, text, add_special_tokens=False)):
            backend, renumber = self._plain_backend
            ids = _ids(backend, text, add_special_tokens=add_special_tokens)
            return [renumber.get(index, index) for index in ids]
        return _ids(self._backend, text, add_special_tokens=add_special_tokens)

    @functools.cached_property
    def _plain_backend(self) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
        """A tokenizer that never makes special tokens of text, and the ids of it that differ from the real ones."""
        plain = tokenizers.Tokenizer.from_str(json.dumps(_without_special_tokens(json.loads(self._backend.to_str()))))
        real = {text: index for index, text in self._texts.items()}
        return plain, {index: real[token.content] for index, token in plain.get_added_tokens_decoder().items()}

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`. Raises ValueError for ids outside the vocabulary."""
        whole = IncrementalDetokenizer(self, skip_special_tokens=skip_special_tokens)
        return whole.push(token_ids) + whole.flush()

    def token_text(self, token_id: int) -> bytes:
        """The bytes of one token, which may be a part of a character. Raises ValueError for an id that is none."""
        self._check_id(token_id, "the token")
        return self._token_bytes[token_id]

    @functools.cached_property
    def _token_bytes(self) -> dict[int, bytes]:
        added = self._backend.get_added_tokens_decoder()
        byte_level, _, replacements, byte_fallback = self._layout
        table: dict[int, bytes] = {}
        for index, text in self._texts.items():
            data = to_bytes(text) if byte_level and index not in added else None
            if data is None and byte_fallback and (match := _BYTE_TOKEN.fullmatch(text)):
                data = bytes.fromhex(match[1])
            if data is None:
                for old, new in replacements:
                    text = text.replace(old, new)
                data = text.encode("utf-8")
            table[index] = data
        return table

    def _check_id(self, token_id: int, what: str) -> None:
        if token_id not in self._texts:
            raise ValueError(
                f"{what} has the id {token_id!r}; expected an id of the vocabulary, 0 to {self.vocab_size - 1}"
            )

    @property
    def chat_template(self) -> str | None:
        """The source of the template that chats use, or None."""
        return self._chat_templates.get("default")

    @property
    def has_chat_template(self) -> bool:
        return bool(self._chat_templates)

    @property
    def has_tool_template(self) -> bool:
        """Whether a template tells the model of `tools`."""
        source = self.chat_template
        return "tool_use" in self._chat_templates or (source is not None and chat_template.reads(source, "tools"))

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt text of a conversation; `kwargs` go to the template. Raises ValueError as its `render` does."""
        source = self._chat_templates.get("tool_use") if tools else None
        source = source or self.chat_template
        if source is None:
            raise ValueError(
                "this tokenizer has no chat template, so messages cannot become a prompt; expected chat_template in "
                f"{CONFIG_FILE}, a file chat_template.jinja, or tokenizer.chat_template in GGUF metadata. "
                f"Templates found: {sorted(self._chat_templates) or 'none'}. Send a plain prompt, or use a chat model"
            )
        return chat_template.render(
            source,
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            variables={**self._special_tokens, **kwargs},
        )

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """The token ids of `render_chat`'s text. Templates write bos themselves, so none is added."""
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt, tools=tools, **kwargs)
        return self.encode(text, add_special_tokens=False)


def _decoder_layout(backend: tokenizers.Tokenizer) -> tuple[bool, int, list[tuple[str, str]], bool]:
    """How tokens spell text: byte level?, spaces stripped at the start, replacements, tokens like <0x0A>?"""
    state = None if backend.decoder is None else json.loads(backend.decoder.__getstate__())
    byte_level, strip, replacements, byte_fallback = False, 0, [], False
    for step in [] if state is None else state.get("decoders", [state]):
        match step:
            case {"type": "ByteLevel"}:
                byte_level = True
            case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                replacements.append((old, new))
            case {"type": "Metaspace", "replacement": old, "prepend_scheme": scheme}:
                replacements.append((old, " "))
                strip = 0 if scheme == "never" else 1
            case {"type": "ByteFallback"}:
                byte_fallback = True
            case {"type": "Strip", "content": " ", "start": start, "stop": 0}:
                strip = start
            case {"type": "Fuse"}:
                pass
            case _:
                raise ValueError(f"the tokenizer's decoder has the step {step}, which is not supported")
    if not byte_level and not replacements and not byte_fallback:
        raise ValueError(f"the tokenizer's decoder is {state}; expected a byte-level or a SentencePiece decoder")
    return byte_level, strip, replacements, byte_fallback


def _comparable(backend: tokenizers.Tokenizer) -> dict[str, Any]:
    description = json.loads(backend.to_str())
    model = description["model"]
    if model["type"] == "Unigram":  # the library's JSON reader misses the last bit of long fractions
        model["vocab"] = [(text, f"{score:.9g}") for text, score in model["vocab"]]
    return description


def _without_special_tokens(description: dict[str, Any]) -> dict[str, Any]:
    """The tokenizer.json of a tokenizer whose special tokens keep their ids but can never match a text."""
    special = {token["content"] for token in description["added_tokens"] if token["special"]}

    def hidden(text: str) -> str:
        # No word reaches the model with a space and a NUL in it: spaces are escaped.
        return f"{text} \0" if text in special else text

    model = description["model"]
    if model["type"] == "BPE":
        model["vocab"] = {hidden(text): index for text, index in model["vocab"].items()}
        model["merges"] = [pair for pair in model["merges"] if special.isdisjoint([*pair, "".join(pair)])]
        if model["unk_token"] is not None:
            model["unk_token"] = hidden(model["unk_token"])
    elif model["type"] == "Unigram":
        model["vocab"] = [[hidden(text), score] for text, score in model["vocab"]]
    else:
        raise ValueError(f"the tokenizer's model is {model['type']}; special tokens as text need BPE or Unigram")
    description["added_tokens"] = [token for token in description["added_tokens"] if not token["special"]]
    return description
