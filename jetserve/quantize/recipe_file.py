"""Recipe files: JSON or YAML that says, by patterns of tensor names, what weights become.

  patterns:
    "*.mlp.down_proj": {type: int8_blockwise, block_size: 64, symmetric: false, method: rtn}
    "re:layers\\.[01]\\.": {type: int8_per_channel}
    lm_head: skip

A pattern is a glob of the whole name, with or without its ".weight", where it holds `*` or `?`; a regular expression,
found anywhere, where it begins with "re:"; else a part of the name. Names are Hugging Face's.

DeepSpeed's settings are read as they are, `{"weight_quantization": {"post_init_quant": {PATTERN: {"num_bits",
"group_size", "group_dim", "symmetric"}}}}`: the first pattern that matches counts there. Here two that match are an
error. Owns both shapes; what the rules do is `recipe`'s.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from jetserve.quantize.recipe import NONE, Overlap, Rule, Rules

PATTERNS = "patterns"
SKIP = "skip"
DEEPSPEED = ("weight_quantization", "post_init_quant")
"""The keys above DeepSpeed's patterns."""


def read_rules(path: Path) -> Rules:
    """The rules of a file: YAML by its suffix (.yaml, .yml), else JSON.

    Raises:
      OSError: if it cannot be read.
      ValueError: if it is not of one of the two shapes, naming what is not.
    """
    text = path.read_text(encoding="utf-8")
    try:
        if path.suffix in (".yaml", ".yml"):
            found = yaml.load(text, _Loader)
        else:
            found = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path} is not a recipe: {error}") from error
    return parse_rules(found, str(path))


def parse_rules(found: Any, where: str) -> Rules:
    """The rules of a parsed file, called `where` in errors. Raises ValueError as `read_rules` does."""
    if isinstance(found, dict) and found.keys() == {PATTERNS}:
        patterns, make, overlap = found[PATTERNS], _rule, Overlap.REFUSED
    elif isinstance(found, dict) and found.keys() == {DEEPSPEED[0]}:
        inner = found[DEEPSPEED[0]]
        if not isinstance(inner, dict) or inner.keys() != {DEEPSPEED[1]}:
            raise ValueError(f"{where}: {DEEPSPEED[0]} is {inner!r}; expected an object with {DEEPSPEED[1]} alone")
        patterns, make, overlap = inner[DEEPSPEED[1]], _deepspeed_rule, Overlap.FIRST_COUNTS
    else:
        keys = ", ".join(map(str, found)) if isinstance(found, dict) else f"a {type(found).__name__}"
        raise ValueError(
            f"{where} holds {keys}; expected an object with {PATTERNS!r}, or with DeepSpeed's {DEEPSPEED[0]!r}"
        )
    if not isinstance(patterns, dict) or not patterns:
        raise ValueError(f"{where} has no patterns; expected an object of patterns and what their tensors become")
    return Rules(rules=tuple(_each(patterns, make, where)), overlap=overlap)


def _each(patterns: Mapping[Any, Any], make: Callable[[str, Any], Rule], where: str) -> list[Rule]:
    rules = []
    for pattern, settings in patterns.items():
        try:
            rules.append(make(str(pattern), settings))
        except ValueError as error:
            raise ValueError(f"{where}: {pattern}: {error}") from error
    return rules


def _fields(settings: Any, known: Mapping[str, type | tuple[type, ...]], required: str) -> dict[str, Any]:
    """The settings of a pattern, if they are an object with only these keys and types."""
    if not isinstance(settings, dict) or settings.keys() - known.keys() or required not in settings:
        raise ValueError(
            f"found {settings!r}; expected an object with {required}, and of {', '.join(known)} what is wanted"
        )
    for key, value in settings.items():
        if not isinstance(value, known[key]) or (isinstance(value, bool) and known[key] is int):
            raise ValueError(f"{key} is {value!r}; expected a {known[key]}")
    return settings


def _rule(pattern: str, settings: Any) -> Rule:
    if settings == SKIP:
        return Rule(pattern=pattern, quantize_type=NONE)
    known = {"type": str, "method": str, "block_size": int, "symmetric": bool}
    found = dict(_fields(settings, known, "type"))
    return Rule(pattern=pattern, quantize_type=found.pop("type"), **found)


def _deepspeed_rule(pattern: str, settings: Any) -> Rule:
    known = {"num_bits": int, "group_size": int, "group_dim": int, "symmetric": bool}
    found = _fields(settings, known, "num_bits")
    if found.get("group_dim", 1) != 1:
        raise ValueError(
            f"group_dim is {found['group_dim']}, groups of outputs; expected 1, groups of inputs, which matmuls can use"
        )
    if found["num_bits"] not in (4, 8):
        raise ValueError(f"num_bits is {found['num_bits']}; expected 4 or 8")
    return Rule(
        pattern=pattern,
        quantize_type=f"int{found['num_bits']}_blockwise",
        block_size=found.get("group_size"),
        symmetric=found.get("symmetric"),
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise ValueError(f"{twice!r} stands there twice")
    return dict(pairs)


class _Loader(yaml.SafeLoader):
    """YAML's, but keys that stand twice are an error here too."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        return _unique(
            [(self.construct_object(key, deep), self.construct_object(value, True)) for key, value in node.value]
        )
