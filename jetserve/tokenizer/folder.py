"""Reads the tokenizer of a checkpoint's folder: which file holds it, and what the configs next to it change.

Owns the meaning of `tokenizer_config.json` and its companions. Knows nothing of how text is encoded.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from jetserve.tokenizer.formats import (
    TokenizerParts,
    add_bos_and_eos,
    is_tiktoken,
    read_sentencepiece,
    read_tiktoken,
)

CONFIG_FILE = "tokenizer_config.json"
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no file. Raises ValueError when it is malformed."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}; expected a JSON object")
    return value


def read_folder(folder: Path) -> TokenizerParts:
    """The tokenizer of a folder. Raises FileNotFoundError when there is none, ValueError when a file is malformed."""
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}; expected one with tokenizer.json or tokenizer.model")
    config = _read_json(folder / CONFIG_FILE)
    fast, model = folder / "tokenizer.json", folder / "tokenizer.model"
    if fast.is_file():
        parts = _read_fast(fast)
    elif model.is_file():
        data = model.read_bytes()
        parts = (read_tiktoken if is_tiktoken(data) else read_sentencepiece)(data, str(model))
        _add_tokens(parts.backend, config, _read_json(folder / "added_tokens.json"))
    else:
        found = ", ".join(sorted(entry.name for entry in folder.iterdir())[:20]) or "nothing"
        raise FileNotFoundError(f"{folder} has no tokenizer: expected tokenizer.json or tokenizer.model, found {found}")
    backend = parts.backend
    named = dict(parts.special_tokens)
    for source in (_read_json(folder / "special_tokens_map.json"), config):
        for name in _NAMED_TOKENS:
            value = source.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            # Models without a padding token are published with the name of one that was never trained.
            if isinstance(text, str) and (name in ("bos_token", "eos_token") or backend.token_to_id(text) is not None):
                named[name] = text
    bos, eos = config.get("add_bos_token"), config.get("add_eos_token")
    if bos is not None or eos is not None:
        add_bos_and_eos(
            backend, bos=named.get("bos_token") if bos else None, eos=named.get("eos_token") if eos else None
        )
    return TokenizerParts(
        backend=backend,
        special_tokens=named,
        eos_token_ids=_end_ids(folder, config, named, parts),
        chat_templates=_read_chat_templates(folder, config),
    )


def _read_fast(path: Path) -> TokenizerParts:
    text = path.read_text(encoding="utf-8")
    try:
        backend = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing more precise
        raise ValueError(f"{path} is not a tokenizer that can be read: {error}") from error
    return TokenizerParts(backend=backend, special_tokens={}, eos_token_ids=())


def _add_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any], added: dict[str, Any]) -> None:
    """Adds what a folder's other files add to a `tokenizer.model`, under the ids that they give."""
    tokens = {index: AddedToken(text, normalized=False, special=False) for text, index in added.items()}
    for index, entry in config.get("added_tokens_decoder", {}).items():
        if "content" not in entry:
            raise ValueError(f"added_tokens_decoder[{index}] in {CONFIG_FILE} has no content; expected a token's text")
        known = {
            key: entry[key] for key in ("lstrip", "rstrip", "single_word", "normalized", "special") if key in entry
        }
        tokens[int(index)] = AddedToken(entry["content"], **known)
    for index, token in sorted(tokens.items()):
        backend.add_tokens([token])
        got = backend.token_to_id(token.content)
        if got != index:
            raise ValueError(
                f"the added token {token.content!r} should have id {index}, but {got} is the next free or taken"
            )


def _end_ids(folder: Path, config: dict[str, Any], named: Mapping[str, str], parts: TokenizerParts) -> tuple[int, ...]:
    """Every end of sequence that the folder names: what `save` wrote, or the configs' of tokenizer and generation."""
    if "eos_token_ids" in config:
        return tuple(config["eos_token_ids"])
    eos = named.get("eos_token")
    ids = [] if eos is None else [parts.backend.token_to_id(eos)]
    generation = _read_json(folder / "generation_config.json").get("eos_token_id")
    if generation is None:
        generation = _read_json(folder / "config.json").get("eos_token_id")
    ids += [] if generation is None else generation if isinstance(generation, list) else [generation]
    return tuple(dict.fromkeys(index for index in [*ids, *parts.eos_token_ids] if index is not None))


def _read_chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Templates by name, "default" first; files win over the entry in the tokenizer's config."""
    entry = config.get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(entry, str):
        templates["default"] = entry
    elif isinstance(entry, list):
        for item in entry:
            match item:
                case {"name": str(name), "template": str(text)}:
                    templates[name] = text
                case _:
                    raise ValueError(
                        f"{folder / CONFIG_FILE} has the chat template {item!r}; expected name and template"
                    )
    elif entry is not None:
        raise ValueError(
            f"chat_template in {folder / CONFIG_FILE} is a {type(entry).__name__}; expected text or a list"
        )
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = file.read_text(encoding="utf-8")
    lone = folder / "chat_template.jinja"
    if lone.is_file():
        templates["default"] = lone.read_text(encoding="utf-8")
    return dict(sorted(templates.items(), key=lambda item: item[0] != "default"))
