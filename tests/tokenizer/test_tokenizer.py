"""Tokenizers of every format against the libraries that define them: sentencepiece, tokenizers and transformers."""

import base64
import itertools
import json
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

from jetserve.tokenizer import IncrementalDetokenizer, StopStrings, Tokenizer
from jetserve.tokenizer.token_bytes import PRE_TOKENIZERS, build_byte_level
from jetserve.tokenizer.tokenizer import LONG_TEXT

sentencepiece = pytest.importorskip("sentencepiece")

CORPUS = Path(__file__).resolve().parents[3] / "shared" / "data" / "wikitext2-valid.txt"
TEXTS = [
    "",
    " ",
    "Hello world",
    "  two spaces,   three  ",
    "line\nbreak\n\n\ttab \r\n",
    "It's 12345 o'clock, WE'LL see 3.14%",
    "naïve café — 漢字かな 한국어 العربية हिन्दी",
    "🙂👩‍👩‍👧 emoji 🏳️‍🌈",
    "def f(x):\n        return x  # ok",
    "aaaaaaaaaaaaaaaa          b",
    "▁ literal <0x41> <unk> </s> <s>",
]
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + "
    "message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
TOOLS = """{%- if tools %}
    {{- '<|im_start|>system\\nTools:' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "<|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(count=0) %}
{%- for message in messages %}
    {%- if message.role == "skip" %}{% continue %}{% endif %}
    {%- set ns.count = ns.count + 1 %}
    {%- if message.tool_calls is defined %}
        {{- message.tool_calls | tojson(indent=2) }}
    {%- endif %}
    {%- if message.role == "assistant" %}
        {% generation %}{{ message.content }}{% endgeneration %}
    {%- else %}
        {{- message.role ~ ": " ~ message.content }}
    {%- endif %}
{%- endfor %}
{{- ns.count ~ (" think" if enable_thinking else "") ~ strftime_now("%Y") }}"""
FAST = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="session")
def default_tokenizer(default_gguf: Path) -> Tokenizer:
    return Tokenizer.from_gguf(gguf.GGUFReader(default_gguf))


def corpus_lines(count: int) -> list[str]:
    if not CORPUS.is_file():
        pytest.skip(f"{CORPUS.name} is not there to train a tokenizer on")
    lines = [line.strip() for line in CORPUS.read_text(encoding="utf-8").splitlines() if line.strip()]
    return lines[:count]


def train_sentencepiece(folder: Path, **options: Any) -> Path:
    lines = corpus_lines(300)  # first: without them nothing is made
    folder.mkdir(parents=True, exist_ok=True)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=700,
        num_threads=1,
        minloglevel=2,
        **options,
    )
    return folder


LLAMA_LIKE = {
    "model_type": "bpe",
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True,
    "split_digits": True,
}
SENTENCEPIECE_KINDS: dict[str, dict[str, Any]] = {
    "llama": LLAMA_LIKE,
    "gemma": {**LLAMA_LIKE, "add_dummy_prefix": False, "user_defined_symbols": ["<turn>", "▁▁", "▁▁▁"]},
    "bpe_default": {"model_type": "bpe", "byte_fallback": True},
    "bpe_no_bytes": {"model_type": "bpe", "user_defined_symbols": ["<turn>"]},
    "unigram": {"model_type": "unigram", "byte_fallback": True, "normalization_rule_name": "identity"},
    "unigram_no_bytes": {"model_type": "unigram", "bos_id": -1, "pad_id": 0, "eos_id": 1, "unk_id": 2},
}


@pytest.fixture(scope="session")
def sentencepiece_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("sentencepiece")

    def folder(kind: str) -> Path:
        path = root / kind
        return path if path.is_dir() else train_sentencepiece(path, **SENTENCEPIECE_KINDS[kind])

    return folder


def byte_level_parts(count: int = 300, size: int = 500) -> tuple[dict[str, int], list[tuple[str, str]]]:
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.train_from_iterator(corpus_lines(count), trainer)
    model = json.loads(backend.to_str())["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


@pytest.fixture(scope="session")
def byte_level() -> tuple[dict[str, int], list[tuple[str, str]]]:
    return byte_level_parts()


def write_gguf(path: Path, fields: dict[str, Any]) -> gguf.GGUFReader:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in fields.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return gguf.GGUFReader(path)


def gpt2_fields(byte_level: tuple[dict[str, int], list[tuple[str, str]]], **more: Any) -> dict[str, Any]:
    vocabulary, merges = byte_level
    pieces = [*sorted(vocabulary, key=vocabulary.__getitem__), "<|im_start|>", "<|im_end|>", "<tool>", "<|endoftext|>"]
    count = len(vocabulary)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": [1] * count + [3, 3, 4, 3],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.bos_token_id": count,
        "tokenizer.ggml.eos_token_id": count + 1,
        "tokenizer.ggml.add_bos_token": False,
        **{f"tokenizer.{key}": value for key, value in more.items()},
    }


@pytest.fixture(scope="session")
def small(
    byte_level: tuple[dict[str, int], list[tuple[str, str]]], tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    """A byte-level tokenizer with ChatML's special tokens."""
    fields = gpt2_fields(byte_level, chat_template=CHATML)
    return Tokenizer.from_gguf(write_gguf(tmp_path_factory.mktemp("small") / "small.gguf", fields))


# --- SentencePiece model files


@pytest.mark.parametrize("kind", SENTENCEPIECE_KINDS)
def test_a_sentencepiece_model_encodes_and_decodes_as_sentencepiece(
    kind: str, sentencepiece_folder: Callable[[str], Path]
) -> None:
    folder = sentencepiece_folder(kind)
    oracle = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.vocab_size == oracle.get_piece_size()
    assert tokenizer.bos_token_id == (oracle.bos_id() if oracle.bos_id() >= 0 else None)
    assert tokenizer.eos_token_ids == (oracle.eos_id(),)
    for text in [*TEXTS, "a<turn>b <turn>", "<turn>", *corpus_lines(340)[300:]]:
        ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        assert ids == oracle.encode(text), text
        if oracle.unk_id() not in ids and "▁" not in text:  # a literal ▁ at the start is one space more
            assert tokenizer.decode(ids) == oracle.decode(ids)


@FAST
@given(
    text=st.text(
        st.characters(max_codepoint=0x3100, exclude_categories=["Cs", "Cc", "Cn"]) | st.sampled_from("  \nae"),
        max_size=30,
    )
)
def test_any_text_encodes_as_sentencepiece_does(text: str, sentencepiece_folder: Callable[[str], Path]) -> None:
    for kind in ("llama", "gemma", "unigram"):
        folder = sentencepiece_folder(kind)
        oracle = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
        tokenizer = Tokenizer.from_folder(folder)
        ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        assert ids == oracle.encode(text)
        assert tokenizer.decode(ids) == oracle.decode(ids)


@pytest.mark.parametrize("kind", ["llama", "unigram"])
def test_control_tokens_in_text_are_parsed_only_on_request(
    kind: str, sentencepiece_folder: Callable[[str], Path]
) -> None:
    tokenizer = Tokenizer.from_folder(sentencepiece_folder(kind))
    end = tokenizer.eos_token_ids[0]
    assert end in tokenizer.encode("a</s>b", add_special_tokens=False)
    plain = tokenizer.encode("a</s>b", add_special_tokens=True, parse_special=False)
    assert plain[0] == tokenizer.bos_token_id
    assert end not in plain
    assert tokenizer.decode(plain) == "a</s>b"


def test_a_folder_adds_tokens_and_settings_to_a_sentencepiece_model(
    sentencepiece_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.model").write_bytes((sentencepiece_folder("llama") / "tokenizer.model").read_bytes())
    config = {
        "add_bos_token": False,
        "add_eos_token": True,
        "eos_token": {"content": "<|end|>"},
        "added_tokens_decoder": {"700": {"content": "<|end|>", "special": True}, "701": {"content": "<tool>"}},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.vocab_size == 702
    assert tokenizer.eos_token_ids == (700, 2)
    assert tokenizer.encode("a", add_special_tokens=True)[-1] == 700
    assert tokenizer.encode("<tool>", add_special_tokens=False) == [701]
    config["added_tokens_decoder"] = {"800": {"content": "<|end|>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="should have id 800, but 700"):
        Tokenizer.from_folder(tmp_path)


# --- Meta's tiktoken-style model files


def byte_pair_by_rank(word: bytes, ranks: dict[bytes, int]) -> list[int]:
    parts = [bytes([byte]) for byte in word]
    while True:
        pairs = [(ranks[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ranks]
        if not pairs:
            return [ranks[part] for part in parts]
        _, best = min(pairs)
        parts[best : best + 2] = [parts[best] + parts[best + 1]]


def test_a_tiktoken_file_encodes_by_rank(byte_level: tuple[dict[str, int], Any], tmp_path: Path) -> None:
    decoder = decoders.ByteLevel()
    words = sorted(byte_level[0], key=byte_level[0].__getitem__)
    merged = [decoder.decode([word]).encode() for word in words if decoder.decode([word]).isascii()]
    tokens = list(dict.fromkeys([*(bytes([byte]) for byte in range(256)), *merged]))
    ranks = {token: rank for rank, token in enumerate(tokens)}
    lines = [base64.b64encode(token).decode() + f" {rank}" for token, rank in ranks.items()]
    (tmp_path / "tokenizer.model").write_text("\n".join(lines) + "\n")
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.vocab_size == len(ranks) + 256
    assert [tokenizer.token_text(index) for index in range(len(ranks))] == tokens
    assert tokenizer.bos_token_id == len(ranks)
    assert [tokenizer.token_text(index).decode() for index in tokenizer.eos_token_ids] == [
        "<|end_of_text|>",
        "<|eom_id|>",
        "<|eot_id|>",
    ]
    for text in ["Hello the Valkyria Chronicles", *TEXTS[:-1], *corpus_lines(20)]:
        spans = [span for _, span in tokenizer._backend.pre_tokenizer.pre_tokenize_str(text)]
        expected = [rank for start, end in spans for rank in byte_pair_by_rank(text[start:end].encode(), ranks)]
        assert tokenizer.encode(text, add_special_tokens=True) == [len(ranks), *expected]
    (tmp_path / "tokenizer.model").write_text("\n".join([*lines, "QQ"]))
    with pytest.raises(ValueError, match=f"line {len(lines) + 1} of .*truncated"):
        Tokenizer.from_folder(tmp_path)


# --- GGUF metadata


def test_the_default_models_tokenizer(default_tokenizer: Tokenizer) -> None:
    assert default_tokenizer.vocab_size == 49152
    assert default_tokenizer.bos_token_id == 1
    assert default_tokenizer.eos_token_ids == (2, 0)  # <|im_end|>, <|endoftext|>
    prompt = default_tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}])
    assert prompt[:4] == [1, 9690, 198, 2683]
    assert default_tokenizer.decode(prompt, skip_special_tokens=False).endswith(
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    for text in TEXTS:
        ids = default_tokenizer.encode(text, add_special_tokens=True)
        assert default_tokenizer.decode(ids) == text


def test_the_default_models_words_are_cut_as_hugging_face_cuts_them(default_tokenizer: Tokenizer) -> None:
    reference = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in [*TEXTS, *corpus_lines(100)]:
        assert default_tokenizer._backend.pre_tokenizer.pre_tokenize_str(text) == reference.pre_tokenize_str(text)


CUTS = {
    "smollm": ["I", "'ll", " take", " ", "1", "2", "3", "4", "  ", " apples", "!!", "\n", "\n", "OK"],
    "gpt-2": ["I", "'ll", " take", " 1234", "  ", " apples", "!!", "\n", "\n", "OK"],
    "llama-bpe": ["I", "'ll", " take", " ", "123", "4", "  ", " apples", "!!\n\n", "OK"],
    "qwen2": ["I", "'ll", " take", " ", "1", "2", "3", "4", "  ", " apples", "!!\n\n", "OK"],
    "tekken": ["I", "'ll", " take", " ", "1", "2", "3", "4", "  ", " apples", "!!\n\n", "OK"],
    "gpt-4o": ["I'll", " take", " ", "123", "4", "  ", " apples", "!!\n\n", "OK"],
    "deepseek-v3": ["I", "'ll", " take", " ", "123", "4", "  ", " apples", "!!\n\n", "OK"],
    "bloom": ["I'll", " take", " 1234", "  ", " apples", "!!\n\n", "OK"],
    "default": ["I", "'", "ll", " take", " ", "123", "4", "  ", " apples", "!!", "\n", "\n", "OK"],
}


@pytest.mark.parametrize("name", CUTS)
def test_pre_tokenizers_cut_words(name: str) -> None:
    vocabulary = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = build_byte_level(vocabulary, [], PRE_TOKENIZERS[name])
    text = "I'll take 1234   apples!!\n\nOK"
    words = [text[start:end] for _, (start, end) in backend.pre_tokenizer.pre_tokenize_str(text)]
    assert words == CUTS[name]


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer_loses_nothing(name: str, byte_level: tuple[dict[str, int], Any]) -> None:
    backend = build_byte_level(*byte_level, PRE_TOKENIZERS[name])
    for text in TEXTS:
        assert backend.decode(backend.encode(text).ids) == text


def test_a_sentencepiece_gguf_encodes_as_its_model_file(
    sentencepiece_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = sentencepiece_folder("llama")
    oracle = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    ids = range(oracle.get_piece_size())
    types = [2 if oracle.is_unknown(i) else 3 if oracle.is_control(i) else 6 if oracle.is_byte(i) else 1 for i in ids]
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [oracle.id_to_piece(index) for index in ids],
        "tokenizer.ggml.scores": [oracle.get_score(index) for index in ids],
        "tokenizer.ggml.token_type": types,
    }
    tokenizer = Tokenizer.from_gguf(write_gguf(tmp_path / "a.gguf", fields))
    lone = Tokenizer.from_folder(folder)
    assert tokenizer.eos_token_ids == (2,)
    for text in [*TEXTS, *corpus_lines(340)[300:]]:
        assert tokenizer.encode(text, add_special_tokens=True) == lone.encode(text, add_special_tokens=True)
        plain = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        assert plain == oracle.encode(text)
    bare = {**fields, "tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}
    tokenizer = Tokenizer.from_gguf(write_gguf(tmp_path / "b.gguf", bare))
    assert tokenizer.decode(tokenizer.encode(" a b", add_special_tokens=True)) == " a b"


def test_gguf_special_tokens(small: Tokenizer) -> None:
    start, end, tool, text_end = range(small.vocab_size - 4, small.vocab_size)
    assert small.eos_token_ids == (end, text_end)
    assert small.encode("<|im_start|><tool><|im_end|>", add_special_tokens=True) == [start, tool, end]
    plain = small.encode("<|im_start|><tool><|im_end|>", add_special_tokens=False, parse_special=False)
    assert tool in plain
    assert start not in plain
    assert end not in plain
    assert small.decode(plain) == "<|im_start|><tool><|im_end|>"
    assert small.decode([start, tool, end]) == "<tool>"
    assert small.token_text(end) == b"<|im_end|>"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": None}, "no tokenizer.ggml.model"),
        ({"tokenizer.ggml.model": "rwkv"}, "'rwkv'; supported are 'gpt2'"),
        ({"tokenizer.ggml.pre": "nonsense"}, "'nonsense', an unknown way .* known are .*smollm"),
        ({"tokenizer.ggml.merges": None}, "no tokenizer.ggml.merges"),
        ({"tokenizer.ggml.merges": ["ab"]}, "merge 0 .* is 'ab'"),
        ({"tokenizer.ggml.merges": ["zq zq"]}, "merges use 2 tokens that are not in the vocabulary"),
        ({"tokenizer.ggml.tokens": None}, "no tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.tokens": ["a", "a"], "tokenizer.ggml.token_type": [1, 1]}, "'a' twice"),
        ({"tokenizer.ggml.token_type": [1]}, "but 1 token types"),
        ({"tokenizer.ggml.eos_token_id": 9999}, "eos_token of the GGUF file is 9999"),
        ({"tokenizer.ggml.eos_token_id": "2"}, "eos_token_id is a str; expected int"),
    ],
)
def test_malformed_gguf_metadata_is_refused(
    change: dict[str, Any], message: str, byte_level: tuple[dict[str, int], Any], tmp_path: Path
) -> None:
    fields = {key: value for key, value in (gpt2_fields(byte_level) | change).items() if value is not None}
    reader = write_gguf(tmp_path / "bad.gguf", fields)
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_gguf(reader)


# --- Hugging Face folders


def write_folder(folder: Path, byte_level: tuple[dict[str, int], Any], **config: Any) -> Path:
    backend = build_byte_level(*byte_level, PRE_TOKENIZERS["llama-bpe"])
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("<|begin|>", "<|end|>", "<|eot|>")])
    bos = backend.token_to_id("<|begin|>")
    backend.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", bos)])
    backend.enable_truncation(8)
    backend.enable_padding(length=8)
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "pad_token": "[PAD]", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_a_hugging_face_folder(byte_level: tuple[dict[str, int], Any], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = write_folder(tmp_path, byte_level)
    count = len(byte_level[0])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [count + 2, count + 1]}))
    tokenizer = Tokenizer.from_folder(folder)
    oracle = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    assert tokenizer.bos_token_id == count
    assert tokenizer.eos_token_ids == (count + 1, count + 2)
    for text in [*TEXTS, "<|eot|> and a text longer than eight tokens"]:
        ids = tokenizer.encode(text, add_special_tokens=True)  # neither cut to 8 tokens nor filled up
        assert ids == oracle.encode(text, padding=False, truncation=False)
        assert tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=True)
    assert not tokenizer.has_chat_template
    assert tokenizer.chat_template is None
    with pytest.raises(ValueError, match=r"no chat template.*expected chat_template in"):
        tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    write_folder(tmp_path, byte_level, add_bos_token=False)
    assert Tokenizer.from_folder(folder).encode("a", add_special_tokens=True) != ids[:1]


def test_chat_templates_in_files_and_lists(byte_level: tuple[dict[str, int], Any], tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T{{ tools | length }}"}, {"name": "default", "template": "D"}]
    folder = write_folder(tmp_path, byte_level, chat_template=named)
    tokenizer = Tokenizer.from_folder(folder)
    messages = [{"role": "user", "content": "Hi"}]
    assert tokenizer.render_chat(messages) == "D"
    assert tokenizer.render_chat(messages, tools=[{"type": "function"}]) == "T1"
    tokenizer.save(tmp_path / "saved")
    assert Tokenizer.from_folder(tmp_path / "saved") == tokenizer
    (folder / "chat_template.jinja").write_text("{{ bos_token }}F")
    assert Tokenizer.from_folder(folder).render_chat(messages) == "<|begin|>F"
    write_folder(tmp_path, byte_level, chat_template=[{"name": "default"}])
    with pytest.raises(ValueError, match="expected name and template"):
        Tokenizer.from_folder(folder)


def test_malformed_folders_are_refused(
    byte_level: tuple[dict[str, int], Any], sentencepiece_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(FileNotFoundError, match="no folder"):
        Tokenizer.from_folder(tmp_path / "missing")
    (tmp_path / "weights.bin").touch()
    with pytest.raises(FileNotFoundError, match=r"expected tokenizer\.json or tokenizer\.model, found weights"):
        Tokenizer.from_folder(tmp_path)
    whole = (sentencepiece_folder("llama") / "tokenizer.model").read_bytes()
    for size in (0, 1, len(whole) // 2, len(whole) - 1):
        (tmp_path / "tokenizer.model").write_bytes(whole[:size])
        with pytest.raises(ValueError, match="truncated"):
            Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": ')
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer that can be read"):
        Tokenizer.from_folder(tmp_path)
    write_folder(tmp_path, byte_level, eos_token="<|other|>")
    with pytest.raises(ValueError, match=r"eos_token is '<\|other\|>', which is not in the vocabulary"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[1")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is not valid JSON"):
        Tokenizer.from_folder(tmp_path)


def test_saving_and_loading_gives_an_equal_tokenizer(
    small: Tokenizer, sentencepiece_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    tokenizers_by_name = {kind: Tokenizer.from_folder(sentencepiece_folder(kind)) for kind in SENTENCEPIECE_KINDS}
    for name, tokenizer in {"small": small, **tokenizers_by_name}.items():
        tokenizer.save(tmp_path / name)
        loaded = Tokenizer.from_folder(tmp_path / name)
        assert loaded == tokenizer
        assert (loaded.eos_token_ids, loaded.bos_token_id) == (tokenizer.eos_token_ids, tokenizer.bos_token_id)
        assert loaded.chat_template == tokenizer.chat_template
        for text in TEXTS:
            for parse_special in (False, True):
                ids = tokenizer.encode(text, add_special_tokens=True, parse_special=parse_special)
                assert loaded.encode(text, add_special_tokens=True, parse_special=parse_special) == ids
                assert loaded.decode(ids) == tokenizer.decode(ids)
    assert small != tokenizers_by_name["llama"]


def test_ids_and_text_that_are_none_are_refused(small: Tokenizer) -> None:
    for bad in (small.vocab_size, -1, 10**9):
        with pytest.raises(ValueError, match=f"id {bad}; expected an id of the vocabulary, 0 to"):
            small.decode([0, bad])
        with pytest.raises(ValueError, match=f"id {bad}"):
            small.token_text(bad)
    with pytest.raises(ValueError, match="surrogate"):
        small.encode("a\ud800", add_special_tokens=True)


# --- Chat templates


MESSAGES = [
    {"role": "system", "content": 'Be <b>brief</b> & "kind".'},
    {"role": "user", "content": "  Häagen 漢字?  "},
    {"role": "assistant", "content": "Yes.\n"},
    {"role": "user", "content": "More"},
]
TOOL_SCHEMA = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"città": {"type": "string"}}}},
}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "weather", "arguments": {"x": 1}}}]}


@pytest.mark.parametrize("template", [CHATML, LLAMA3, TOOLS], ids=["chatml", "llama3", "tools"])
@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_chat_templates_render_as_in_transformers(
    template: str, add_generation_prompt: bool, byte_level: tuple[dict[str, int], Any], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    folder = write_folder(tmp_path, byte_level, chat_template=template)
    tokenizer = Tokenizer.from_folder(folder)
    oracle = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    for messages in (MESSAGES, MESSAGES[1:2], [*MESSAGES, {"role": "skip", "content": "x"}, CALL]):
        for tools in (None, [TOOL_SCHEMA]):
            options = {"tools": tools, "add_generation_prompt": add_generation_prompt, "enable_thinking": True}
            expected = oracle.apply_chat_template(messages, tokenize=False, **options)
            assert tokenizer.render_chat(messages, **options) == expected
            ids = oracle.encode(expected, add_special_tokens=False, truncation=False, padding=False)
            assert tokenizer.apply_chat_template(messages, **options) == ids


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("Hi", "messages is a str; expected a list"),
        ([], "messages is empty"),
        (["Hi"], r"messages\[0\] is 'Hi'"),
        ([{"content": "Hi"}], r"messages\[0\]\.role is None"),
        ([{"role": "user"}], r"messages\[0\] has no content"),
        ([{"role": "user", "content": 3}], r"messages\[0\]\.content is a int"),
        ([{"role": "user", "content": "Hi", "extra": object()}], r"messages\[0\]\.extra is a object; .*JSON data"),
    ],
)
def test_malformed_conversations_are_refused(messages: Any, message: str, small: Tokenizer) -> None:
    with pytest.raises(ValueError, match=message):
        small.render_chat(messages)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for x in %}", "not valid Jinja"),
        ("{{ messages[0].content + 1 }}", "refused the conversation"),
        ("{{ ''.__class__.__mro__ }}", "refused the conversation.*unsafe"),
        ("{{ messages.append(1) }}", "refused the conversation.*safe"),
        ("{{ range(10 ** 9) | length }}", "refused the conversation"),
    ],
)
def test_template_errors_are_value_errors(
    template: str, message: str, byte_level: tuple[dict[str, int], Any], tmp_path: Path
) -> None:
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, byte_level, chat_template=template))
    with pytest.raises(ValueError, match=message):
        tokenizer.render_chat([{"role": "user", "content": "Hi"}])


# --- Text as it arrives


def chunked(items: Any, cuts: list[int]) -> list[Any]:
    edges = sorted({0, len(items), *(cut % (len(items) + 1) for cut in cuts)})
    return [items[start:end] for start, end in itertools.pairwise(edges)]


CUT_LISTS = st.lists(st.integers(0, 1000), max_size=12)


@FAST
@given(data=st.data(), cuts=CUT_LISTS, skip=st.booleans())
@pytest.mark.parametrize("kind", ["small", "llama", "gemma", "unigram"])
def test_any_tokens_in_any_chunks_give_the_text_of_all(
    kind: str, data: st.DataObject, cuts: list[int], skip: bool, request: pytest.FixtureRequest
) -> None:
    tokenizer = cached_tokenizer(kind, request)
    texts = st.sampled_from([*TEXTS, "🙂🙂", "漢字", " "])
    encoded = texts.map(lambda text: tokenizer.encode(text, add_special_tokens=True))
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1).map(lambda i: [i]) | encoded, max_size=15))
    tokens = [token for part in ids for token in part]
    whole = tokenizer.decode(tokens, skip_special_tokens=skip)
    stream = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    pieces = [stream.push(chunk) for chunk in chunked(tokens, cuts)]
    assert "".join(pieces) + stream.flush() == whole
    raw = b"".join(tokenizer.token_text(t) for t in tokens if not (skip and tokenizer.is_special(t)))
    strip = tokenizer.leading_spaces_stripped and raw.startswith(b" ")
    assert whole == raw[strip:].decode("utf-8", "replace")


def cached_tokenizer(kind: str, request: pytest.FixtureRequest, _cache: dict[str, Tokenizer] = {}) -> Tokenizer:  # noqa: B006
    if kind not in _cache:
        fixture = request.getfixturevalue("small" if kind == "small" else "sentencepiece_folder")
        _cache[kind] = fixture if kind == "small" else Tokenizer.from_folder(fixture(kind))
    return _cache[kind]


def test_characters_are_whole_and_spaces_right(sentencepiece_folder: Callable[[str], Path]) -> None:
    tokenizer = Tokenizer.from_folder(sentencepiece_folder("llama"))
    emoji = tokenizer.encode("🙂", add_special_tokens=False)[-4:]
    assert [tokenizer.token_text(token) for token in emoji] == [bytes([byte]) for byte in "🙂".encode()]
    stream = IncrementalDetokenizer(tokenizer)
    assert [stream.push([token]) for token in emoji] == ["", "", "", "🙂"]
    assert stream.push(emoji[:2]) == ""
    assert stream.flush() == "\ufffd"
    prompt, answer = (tokenizer.encode(text, add_special_tokens=True) for text in ("The", "film"))
    assert IncrementalDetokenizer(tokenizer).push(answer) == "film"
    assert IncrementalDetokenizer(tokenizer, prompt_token_ids=prompt).push(answer) == " film"
    with pytest.raises(ValueError, match="expected an id of the vocabulary"):
        stream.push([tokenizer.vocab_size])


def test_the_cost_of_a_token_does_not_grow(small: Tokenizer) -> None:
    asked: list[int] = []

    def token_text(token: int) -> bytes:
        asked.append(token)
        return small.token_text(token)

    spy = types.SimpleNamespace(leading_spaces_stripped=0, token_text=token_text, is_special=small.is_special)
    stream = IncrementalDetokenizer(spy)
    tokens = small.encode("long 🙂 text " * 100, add_special_tokens=False)
    for token in tokens:
        stream.push([token])
    assert len(asked) == len(tokens)


def naive_stop(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """The stop that ends first, the longest of several, by searching the whole text."""
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if text.find(stop) >= 0]
    if not ends:
        return text, None
    _, _, stop = min(ends)
    return text[: text.find(stop)], stop


@FAST
@given(
    text=st.text("ab\n🙂", max_size=40),
    stops=st.lists(st.text("ab\n🙂", min_size=1, max_size=5), max_size=4).map(tuple),
    cuts=CUT_LISTS,
)
def test_stop_strings_match_a_search_of_the_whole_text(text: str, stops: tuple[str, ...], cuts: list[int]) -> None:
    watch = StopStrings(stops)
    shown, matched = "", None
    for chunk in chunked(text, cuts):
        safe, matched = watch.push(chunk)
        shown += safe
        if matched is None:
            held = text[len(shown) : len(shown) + len(watch._held)]
            assert not held or any(stop.startswith(held) for stop in stops)
    assert (shown + watch.flush(), matched) == naive_stop(text, stops)


def test_stop_strings_hold_back_only_what_may_be_a_stop() -> None:
    watch = StopStrings(("\nUser:", "END"))
    assert watch.push("Hello\nUs") == ("Hello", None)
    assert watch.push("ed E") == ("\nUsed ", None)
    assert watch.push("N") == ("", None)
    assert watch.push("D more") == ("", "END")
    assert watch.push("more") == ("", "END")
    assert watch.flush() == ""
    assert StopStrings(()).push("anything") == ("anything", None)
    with pytest.raises(ValueError, match="not empty"):
        StopStrings(("",))


def test_long_texts_are_encoded_as_short_ones_are(small: Tokenizer) -> None:
    """By another call of the library, which lets other threads run meanwhile."""
    text = "hello world, 123 éß😀 " * 600
    assert len(text) > LONG_TEXT
    piece = small.encode(text[:9000], add_special_tokens=False)
    whole = small.encode(text, add_special_tokens=False)
    assert whole[: len(piece) - 2] == piece[:-2]
    assert small.decode(whole) == text
