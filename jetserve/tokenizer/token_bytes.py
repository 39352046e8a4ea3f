"""Byte-level BPE: its alphabet, and the rules that cut text into words before merging, by the names GGUF gives them.

Owns the table of those rules. Knows nothing of files or special tokens. The rules are those of the Hugging Face
tokenizers that the names stand for, as llama.cpp's `llama-vocab.cpp` lists them.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BAILING_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
_SEED_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN_PATTERN = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|{_TAIL}"
_GPT4O_PATTERN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}"
    rf"|\p{{N}}{{1,3}}|{_TAIL}"
)
_BLOOM_PATTERN = r" ?[^(\s|.,!?…。，、।۔،)]+"
_DEEPSEEK3_PATTERNS = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_DEEPSEEK_CODER_PATTERNS = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")
_DEFAULT_PATTERNS = (r"[\p{P}\$\+<=>\^~\|]+", GPT2_PATTERN, r"\p{N}+", r"[0-9][0-9][0-9]")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreTokenizer:
    """Text is cut at the matches of each pattern in turn. `ignore_merges`: a word of the vocabulary is never merged up.

    `add_bos` is whether such models begin with the bos token when their metadata does not say.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False


_TABLE = {
    "default": PreTokenizer(patterns=_DEFAULT_PATTERNS),
    "gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 gigachat mellum a.x-4.0": PreTokenizer(
        patterns=(GPT2_PATTERN,)
    ),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": PreTokenizer(
        patterns=(r"\p{N}", GPT2_PATTERN)
    ),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2": PreTokenizer(
        patterns=(LLAMA3_PATTERN,), ignore_merges=True, add_bos=True
    ),
    "dbrx smaug-bpe glm4 chatglm-bpe": PreTokenizer(patterns=(LLAMA3_PATTERN,)),
    "qwen2": PreTokenizer(patterns=(_QWEN2_PATTERN,), nfc=True),
    "deepseek-r1-qwen stablelm2 megrez hunyuan kormo f2llmv2 grok-2 solar-open": PreTokenizer(
        patterns=(_QWEN2_PATTERN,)
    ),
    "qwen35": PreTokenizer(patterns=(_QWEN35_PATTERN,), nfc=True),
    "tekken": PreTokenizer(patterns=(_TEKKEN_PATTERN,), ignore_merges=True, add_bos=True),
    "gpt-4o llama4 kanana2 minimax-m2": PreTokenizer(patterns=(_GPT4O_PATTERN,)),
    "bloom poro-chat gpt3-finnish": PreTokenizer(patterns=(_BLOOM_PATTERN,)),
    "viking": PreTokenizer(patterns=(_BLOOM_PATTERN, r"\p{N}")),
    "deepseek-v3 hunyuan-dense joyai-llm": PreTokenizer(patterns=_DEEPSEEK3_PATTERNS),
    "deepseek-coder": PreTokenizer(patterns=_DEEPSEEK_CODER_PATTERNS),
    "bailingmoe bailingmoe2 llada-moe": PreTokenizer(patterns=(_BAILING_PATTERN,)),
    "seed-coder": PreTokenizer(patterns=(_SEED_PATTERN,)),
}
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    name: pre_tokenizer for names, pre_tokenizer in _TABLE.items() for name in names.split()
}


def _alphabet() -> list[str]:
    """The character that stands for each byte: itself where it prints, else one from U+0100 up (GPT-2)."""
    printing = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printing else next(others)) for byte in range(256)]


_CHARACTERS = _alphabet()
_BYTES = {character: byte for byte, character in enumerate(_CHARACTERS)}


def to_characters(data: bytes) -> str:
    """How a byte-level vocabulary writes these bytes."""
    return "".join([_CHARACTERS[byte] for byte in data])


def to_bytes(text: str) -> bytes | None:
    """The bytes that a byte-level vocabulary writes so; None if it contains other characters."""
    try:
        return bytes([_BYTES[character] for character in text])
    except KeyError:
        return None


def build_byte_level(
    vocabulary: dict[str, int], merges: Sequence[tuple[str, str]], pre_tokenizer: PreTokenizer
) -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer without special tokens. Raises ValueError when merges and vocabulary do not fit."""
    parts = {part for merge in merges for part in (*merge, "".join(merge))}
    unknown = sorted(parts - vocabulary.keys())
    if unknown:
        raise ValueError(
            f"merges use {len(unknown)} tokens that are not in the vocabulary, the first is {unknown[0]!r}"
        )
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=list(merges), ignore_merges=pre_tokenizer.ignore_merges)
    )
    if pre_tokenizer.nfc:
        backend.normalizer = normalizers.NFC()
    cuts: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in pre_tokenizer.patterns
    ]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend
