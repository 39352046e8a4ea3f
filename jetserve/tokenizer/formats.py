"""Rebuilds tokenizers from the formats other than Hugging Face's tokenizer.json.

Owns SentencePiece's model file, Meta's tiktoken-style model file and GGUF's tokenizer metadata; each becomes a
`tokenizers.Tokenizer` with the names of its special tokens. Knows nothing of folders, chat templates' meaning or text.
"""

import base64
import binascii
import dataclasses
import enum
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from jetserve.tokenizer.token_bytes import LLAMA3_PATTERN, PreTokenizer, build_byte_level, to_characters

SPACE = "▁"  # U+2581, how SentencePiece writes a space

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerParts:
    """What a tokenizer is made of. `special_tokens` maps "bos_token", "eos_token", … to texts of the vocabulary."""

    backend: tokenizers.Tokenizer
    special_tokens: Mapping[str, str]
    eos_token_ids: tuple[int, ...]
    chat_templates: Mapping[str, str] = dataclasses.field(default_factory=dict)


class PieceType(enum.IntEnum):
    """SentencePiece's types of pieces; GGUF uses the same numbers."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class SentencePieceModel(enum.IntEnum):
    """The two algorithms of SentencePiece that language models use, by their number in the model file."""

    UNIGRAM = 1
    BPE = 2


def check_distinct(pieces: Sequence[str]) -> None:
    """Raises ValueError, naming it, when a piece stands twice in a vocabulary."""
    seen: set[str] = set()
    for piece in pieces:
        if piece in seen:
            raise ValueError(f"the vocabulary has the token {piece!r} twice; expected every token once")
        seen.add(piece)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SentencePieceSpec:
    """A SentencePiece vocabulary and its settings; `pieces[i]`, `scores[i]` and `types[i]` describe token i.

    `added_user_defined`: user-defined pieces are cut from the raw text, and what follows one starts anew with a dummy
    prefix (llama.cpp, Hugging Face), in place of being cut from the normalized text (SentencePiece itself).
    """

    model: SentencePieceModel
    pieces: Sequence[str]
    scores: Sequence[float]
    types: Sequence[PieceType]
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool
    escape_whitespaces: bool = True
    precompiled_charsmap: bytes = b""
    added_user_defined: bool

    def __post_init__(self) -> None:
        count = len(self.pieces)
        if not count or len(self.scores) != count or len(self.types) != count:
            raise ValueError(
                f"the tokenizer has {count} pieces, {len(self.scores)} scores and {len(self.types)} types; "
                "expected as many of each, and at least one"
            )
        check_distinct(self.pieces)

    def texts(self, *types: PieceType) -> list[str]:
        return [piece for piece, kind in zip(self.pieces, self.types, strict=True) if kind in types]


def _merges_from_scores(spec: SentencePieceSpec) -> list[tuple[str, str]]:
    """BPE merges, best first: every way to make a normal piece of two others, ranked by the score of the whole."""
    normal = {
        piece: (-score, index)
        for index, (piece, score, kind) in enumerate(zip(spec.pieces, spec.scores, spec.types, strict=True))
        if kind is PieceType.NORMAL
    }
    ranked = []
    for piece, rank in normal.items():
        for cut in range(1, len(piece)):
            left, right = normal.get(piece[:cut]), normal.get(piece[cut:])
            if left is not None and right is not None:
                ranked.append((rank, left[1], right[1], piece[:cut], piece[cut:]))
    return [(left, right) for *_, left, right in sorted(ranked)]


def _sentencepiece_model(spec: SentencePieceSpec) -> models.Model:
    unknown = spec.texts(PieceType.UNKNOWN)
    byte_fallback = PieceType.BYTE in spec.types
    if spec.model is SentencePieceModel.BPE:
        return models.BPE(
            vocab={piece: index for index, piece in enumerate(spec.pieces)},
            merges=_merges_from_scores(spec),
            unk_token=unknown[0] if unknown else None,
            fuse_unk=True,
            byte_fallback=byte_fallback,
            # User-defined pieces have no merges; they come alone, and are found whole.
            ignore_merges=bool(spec.texts(PieceType.USER_DEFINED)),
        )
    # SentencePiece keeps these out of its search. Here they must have a score: one that any real path beats.
    unreachable = -1e6
    scores = [
        0.0 if kind is PieceType.USER_DEFINED else score if kind is PieceType.NORMAL else unreachable
        for score, kind in zip(spec.scores, spec.types, strict=True)
    ]
    return models.Unigram(
        vocab=list(zip(spec.pieces, scores, strict=True)),
        unk_id=spec.pieces.index(unknown[0]) if unknown else None,
        byte_fallback=byte_fallback,
    )


def build_sentencepiece(spec: SentencePieceSpec) -> tokenizers.Tokenizer:
    """A tokenizer that encodes as SentencePiece does, with control tokens in the text recognised."""
    backend = tokenizers.Tokenizer(_sentencepiece_model(spec))
    steps: list[normalizers.Normalizer] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(" "))
    decoding: list[decoders.Decoder] = []
    if spec.escape_whitespaces:
        steps.append(normalizers.Replace(" ", SPACE))
        decoding.append(decoders.Replace(SPACE, " "))
    backend.normalizer = normalizers.Sequence(steps)
    decoding += [decoders.ByteFallback(), decoders.Fuse()]
    if spec.add_dummy_prefix:
        decoding.append(decoders.Strip(content=" ", left=1, right=0))
    backend.decoder = decoders.Sequence(decoding)

    user_defined = spec.texts(PieceType.USER_DEFINED)
    if spec.added_user_defined:
        backend.add_tokens([AddedToken(text, normalized=False, special=False) for text in user_defined])
    cuts = [] if spec.added_user_defined else sorted(user_defined, key=len, reverse=True)
    patterns = ["|".join(map(re.escape, cuts))] if cuts else []
    if spec.model is SentencePieceModel.UNIGRAM and not set("<0x>123456789ABCDEF").issubset(spec.pieces):
        # A text like "<0x41>" must not become that byte token. Scores prevent it only where each character has a piece.
        patterns.append("<(?=0x[0-9A-F]{2}>)")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    )
    control = spec.texts(PieceType.CONTROL, PieceType.UNKNOWN)
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in control])
    return backend


def add_bos_and_eos(backend: tokenizers.Tokenizer, *, bos: str | None, eos: str | None) -> None:
    """Makes `add_special_tokens=True` put `bos` before and `eos` after the text; None: nothing there."""
    pieces = ["$A"]
    tokens: list[dict[str, Any]] = []
    for name, text in (("bos", bos), ("eos", eos)):
        if text is not None:
            pieces.insert(0 if name == "bos" else len(pieces), name)
            tokens.append({"id": name, "ids": [backend.token_to_id(text)], "tokens": [text]})
    backend.post_processor = processors.TemplateProcessing(single=pieces, special_tokens=tokens)


@functools.cache
def _model_proto() -> type[message.Message]:
    """The message class for the part of sentencepiece_model.proto that encoding needs."""
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="jetserve_sentencepiece.proto", package="jetserve", syntax="proto2")
    layout: dict[str, list[tuple[str, int, Any, str]]] = {
        "Piece": [
            ("piece", 1, kinds.TYPE_STRING, ""),
            ("score", 2, kinds.TYPE_FLOAT, ""),
            ("type", 3, kinds.TYPE_INT32, "1"),
        ],
        "Trainer": [
            ("model_type", 3, kinds.TYPE_INT32, "1"),
            ("treat_whitespace_as_suffix", 24, kinds.TYPE_BOOL, ""),
            ("unk_id", 40, kinds.TYPE_INT32, "0"),
            ("bos_id", 41, kinds.TYPE_INT32, "1"),
            ("eos_id", 42, kinds.TYPE_INT32, "2"),
            ("pad_id", 43, kinds.TYPE_INT32, "-1"),
        ],
        "Normalizer": [
            ("precompiled_charsmap", 2, kinds.TYPE_BYTES, ""),
            ("add_dummy_prefix", 3, kinds.TYPE_BOOL, "true"),
            ("remove_extra_whitespaces", 4, kinds.TYPE_BOOL, "true"),
            ("escape_whitespaces", 5, kinds.TYPE_BOOL, "true"),
        ],
    }
    for name, fields in layout.items():
        described = file.message_type.add(name=name)
        for field, number, kind, default in fields:
            described.field.add(
                name=field, number=number, type=kind, label=kinds.LABEL_OPTIONAL, default_value=default or None
            )
    model = file.message_type.add(name="Model")
    for field, number, name, label in (
        ("pieces", 1, "Piece", kinds.LABEL_REPEATED),
        ("trainer_spec", 2, "Trainer", kinds.LABEL_OPTIONAL),
        ("normalizer_spec", 3, "Normalizer", kinds.LABEL_OPTIONAL),
    ):
        model.field.add(name=field, number=number, type=kinds.TYPE_MESSAGE, type_name=f".jetserve.{name}", label=label)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("jetserve.Model"))


def read_sentencepiece(data: bytes, source: str) -> TokenizerParts:
    """The tokenizer of a SentencePiece model file's bytes. Raises ValueError when they are not one, naming `source`."""
    proto: Any = _model_proto()()
    try:
        proto.ParseFromString(data)
    except message.DecodeError as error:
        raise ValueError(
            f"{source} ({len(data)} bytes) is neither a SentencePiece model nor lines of tiktoken ranks; "
            f"it may be truncated: get it again ({error})"
        ) from error
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    if not proto.pieces or not proto.HasField("trainer_spec") or not proto.HasField("normalizer_spec"):
        raise ValueError(f"{source} ({len(data)} bytes) lacks parts of a SentencePiece model; it may be truncated")
    if trainer.model_type not in set(SentencePieceModel):
        raise ValueError(f"{source} has SentencePiece model type {trainer.model_type}; expected 1 (Unigram) or 2 (BPE)")
    if trainer.treat_whitespace_as_suffix:
        raise ValueError(f"{source} writes spaces after words (treat_whitespace_as_suffix), which is not supported")
    spec = SentencePieceSpec(
        model=SentencePieceModel(trainer.model_type),
        pieces=[piece.piece for piece in proto.pieces],
        scores=[piece.score for piece in proto.pieces],
        types=[PieceType(piece.type) for piece in proto.pieces],
        add_dummy_prefix=normalizer.add_dummy_prefix,
        remove_extra_whitespaces=normalizer.remove_extra_whitespaces,
        escape_whitespaces=normalizer.escape_whitespaces,
        precompiled_charsmap=normalizer.precompiled_charsmap,
        added_user_defined=False,
    )
    ids = dict(zip(_NAMED_TOKENS, (trainer.bos_id, trainer.eos_id, trainer.unk_id, trainer.pad_id), strict=True))
    named = {name: spec.pieces[index] for name, index in ids.items() if 0 <= index < len(spec.pieces)}
    backend = build_sentencepiece(spec)
    # Llama, Mistral and Gemma start with bos; T5, which has none, ends with eos. Configs may say otherwise.
    add_bos_and_eos(backend, bos=named.get("bos_token"), eos=None if "bos_token" in named else named.get("eos_token"))
    ends = (ids["eos_token"],) if "eos_token" in named else ()
    return TokenizerParts(backend=backend, special_tokens=named, eos_token_ids=ends)


def is_tiktoken(data: bytes) -> bool:
    """Whether the first line is a base64 token and a rank, as in Meta's Llama-3 `tokenizer.model`."""
    return re.match(rb"[A-Za-z0-9+/]+=* \d+\r?(\n|\Z)", data) is not None


def _llama3_special_tokens() -> list[str]:
    names = ["begin_of_text", "end_of_text", "reserved_special_token_0", "reserved_special_token_1"]
    names += ["finetune_right_pad_id", "step_id", "start_header_id", "end_header_id", "eom_id", "eot_id", "python_tag"]
    names += [f"reserved_special_token_{2 + index}" for index in range(256 - len(names))]
    return [f"<|{name}|>" for name in names]


def read_tiktoken(data: bytes, source: str) -> TokenizerParts:
    """The tokenizer of Meta's Llama-3 model file: byte-level BPE ranks, then 256 special tokens of fixed names."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), start=1):
        try:
            encoded, written_rank = line.split()
            ranks[base64.b64decode(encoded, validate=True)] = int(written_rank)
        except (ValueError, binascii.Error) as error:
            raise ValueError(
                f"line {number} of {source} is {line[:40]!r}; expected a base64 token and its rank. "
                "The file may be truncated: get it again"
            ) from error
    if sorted(ranks.values()) != list(range(len(ranks))) or any(bytes([byte]) not in ranks for byte in range(256)):
        raise ValueError(f"{source} has {len(ranks)} ranks; expected all from 0 up, each once, and every single byte")
    merges = []
    for whole, rank in ranks.items():
        for cut in range(1, len(whole)):
            left, right = ranks.get(whole[:cut]), ranks.get(whole[cut:])
            if left is not None and right is not None:
                merges.append((rank, left, right, whole[:cut], whole[cut:]))
    backend = build_byte_level(
        {to_characters(whole): rank for whole, rank in ranks.items()},
        [(to_characters(first), to_characters(second)) for *_, first, second in sorted(merges)],
        PreTokenizer(patterns=(LLAMA3_PATTERN,), ignore_merges=True),
    )
    special = _llama3_special_tokens()
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    add_bos_and_eos(backend, bos=special[0], eos=None)
    return TokenizerParts(
        backend=backend,
        special_tokens={"bos_token": special[0], "eos_token": special[1]},
        eos_token_ids=tuple(len(ranks) + special.index(f"<|{name}|>") for name in ("end_of_text", "eom_id", "eot_id")),
    )
