"""Rebuilds a tokenizer from the metadata of a GGUF file.

Owns the meaning of the `tokenizer.*` keys, which follow llama.cpp. Knows nothing of tensors or of other formats' files.
"""

import logging
from collections.abc import Sequence
from typing import Any

import gguf
import tokenizers
from tokenizers import AddedToken

from jetserve.tokenizer.formats import (
    PieceType,
    SentencePieceModel,
    SentencePieceSpec,
    TokenizerParts,
    add_bos_and_eos,
    build_sentencepiece,
    check_distinct,
)
from jetserve.tokenizer.token_bytes import PRE_TOKENIZERS, build_byte_level

_LOG = logging.getLogger(__name__)

# Metadata names one end of sequence; models stop with several. llama.cpp knows the others by their texts, too.
_END_TOKENS = frozenset(
    (
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|endoftext|>"),
        *("<|end_of_text|>", "<end_of_turn>", "<EOT>", "<｜end▁of▁sentence｜>", "</s>", "<eos>"),
    )
)
_TOKEN_KEYS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
_TEMPLATE_KEY = "tokenizer.chat_template"


class _Metadata:
    """Typed access to the fields of a GGUF file."""

    def __init__(self, reader: gguf.GGUFReader) -> None:
        self._fields = reader.fields

    def get(self, key: str, kind: type) -> Any:
        """The value, or None where there is none. Raises ValueError for a value of another type."""
        if key not in self._fields:
            return None
        value = self._fields[key].contents()
        if not isinstance(value, kind):
            raise ValueError(f"GGUF metadata {key} is a {type(value).__name__}; expected {kind.__name__}")
        return value

    def require(self, key: str, kind: type) -> Any:
        value = self.get(key, kind)
        if value is None:
            raise ValueError(
                f"the GGUF file has no {key}, so its tokenizer cannot be rebuilt; "
                "use a file with tokenizer metadata, or name a tokenizer folder"
            )
        return value

    def chat_templates(self) -> dict[str, str]:
        named = {
            key.removeprefix(_TEMPLATE_KEY).removeprefix(".") or "default": self.get(key, str)
            for key in self._fields
            if key == _TEMPLATE_KEY or key.startswith(f"{_TEMPLATE_KEY}.")
        }
        return dict(sorted(named.items(), key=lambda item: item[0] != "default"))


def _pieces_and_types(metadata: _Metadata) -> tuple[list[str], list[PieceType]]:
    pieces = metadata.require("tokenizer.ggml.tokens", list)
    types = metadata.get("tokenizer.ggml.token_type", list)
    if types is None:
        types = [PieceType.NORMAL] * len(pieces)
    if len(types) != len(pieces):
        raise ValueError(f"the GGUF file has {len(pieces)} tokens but {len(types)} token types; expected as many")
    named = [piece or f"[EMPTY_{index}]" for index, piece in enumerate(pieces)]
    check_distinct(named)
    return named, [PieceType(kind) for kind in types]


def _byte_level(
    metadata: _Metadata, pieces: Sequence[str], types: Sequence[PieceType]
) -> tuple[tokenizers.Tokenizer, bool]:
    """The BPE tokenizer of `tokenizer.ggml.model` "gpt2", and whether it begins with bos by default."""
    name = metadata.get("tokenizer.ggml.pre", str)
    if name is None:
        _LOG.warning(
            "the GGUF file has no tokenizer.ggml.pre; words are cut by the 'default' rule, which may not fit it"
        )
        name = "default"
    if name not in PRE_TOKENIZERS:
        raise ValueError(
            f"tokenizer.ggml.pre is {name!r}, an unknown way to cut words; known are "
            f"{', '.join(sorted(PRE_TOKENIZERS))}. Use the model's Hugging Face tokenizer folder instead"
        )
    merges = []
    for index, merge in enumerate(metadata.require("tokenizer.ggml.merges", list)):
        cut = merge.find(" ", 1)
        if cut < 0 or cut + 1 == len(merge):
            raise ValueError(f"merge {index} of the GGUF file is {merge!r}; expected two tokens with a space between")
        merges.append((merge[:cut], merge[cut + 1 :]))
    backend = build_byte_level({piece: index for index, piece in enumerate(pieces)}, merges, PRE_TOKENIZERS[name])
    typed = list(zip(pieces, types, strict=True))
    backend.add_special_tokens(
        [AddedToken(piece, normalized=False, special=True) for piece, kind in typed if kind is PieceType.CONTROL]
    )
    backend.add_tokens([AddedToken(piece, normalized=False) for piece, kind in typed if kind is PieceType.USER_DEFINED])
    return backend, PRE_TOKENIZERS[name].add_bos


def _sentencepiece(metadata: _Metadata, pieces: Sequence[str], types: Sequence[PieceType]) -> tokenizers.Tokenizer:
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", bool)
    spec = SentencePieceSpec(
        model=SentencePieceModel.BPE,
        pieces=pieces,
        scores=metadata.require("tokenizer.ggml.scores", list),
        types=types,
        add_dummy_prefix=prefix is None or prefix,
        remove_extra_whitespaces=metadata.get("tokenizer.ggml.remove_extra_whitespaces", bool) or False,
        added_user_defined=True,
    )
    return build_sentencepiece(spec)


def _end_ids(metadata: _Metadata, pieces: Sequence[str], types: Sequence[PieceType]) -> tuple[int, ...]:
    """All ends of sequence, the one that metadata names first."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    named = [index for key in keys if (index := metadata.get(key, int)) is not None]
    known = {
        piece: index
        for index, (piece, kind) in enumerate(zip(pieces, types, strict=True))
        if kind is PieceType.CONTROL and piece in _END_TOKENS
    }
    if {"<|return|>", "<|call|>"} <= known.keys():
        known.pop("<|end|>", None)  # in that format <|end|> ends a message, and the answer goes on
    return tuple(dict.fromkeys([*named, *sorted(known.values())]))


def read_gguf(reader: gguf.GGUFReader) -> TokenizerParts:
    """The tokenizer in a GGUF file's metadata. Raises ValueError when it is missing, inconsistent or unsupported."""
    metadata = _Metadata(reader)
    kind = metadata.require("tokenizer.ggml.model", str)
    pieces, types = _pieces_and_types(metadata)
    ids = {name: metadata.get(key, int) for name, key in _TOKEN_KEYS.items()}
    if kind == "gpt2":
        backend, default_bos = _byte_level(metadata, pieces, types)
    elif kind == "llama":
        backend, default_bos = _sentencepiece(metadata, pieces, types), True
        for name, index in (("bos_token", 1), ("eos_token", 2), ("unk_token", 0)):  # the format's own defaults
            if ids[name] is None and index < len(pieces):
                ids[name] = index
    else:
        raise ValueError(
            f"tokenizer.ggml.model is {kind!r}; supported are 'gpt2' (byte-level BPE) and 'llama' (SentencePiece BPE). "
            "Use the model's Hugging Face tokenizer folder instead"
        )
    ends = _end_ids(metadata, pieces, types)
    if ids["eos_token"] is not None:
        ends = tuple(dict.fromkeys([ids["eos_token"], *ends]))
    for name, index in [*ids.items(), *(("end of sequence", end) for end in ends)]:
        if index is not None and not 0 <= index < len(pieces):
            raise ValueError(f"{name} of the GGUF file is {index}; expected an id below {len(pieces)}")
    special = {name: pieces[index] for name, index in ids.items() if index is not None}
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", bool)
    add_eos = metadata.get("tokenizer.ggml.add_eos_token", bool)
    add_bos_and_eos(
        backend,
        bos=special.get("bos_token") if (default_bos if add_bos is None else add_bos) else None,
        eos=special.get("eos_token") if add_eos else None,
    )
    return TokenizerParts(
        backend=backend, special_tokens=special, eos_token_ids=ends, chat_templates=metadata.chat_templates()
    )
