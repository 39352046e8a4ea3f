"""How a Hugging Face folder says that its weights are quantized: where the settings stand, and their many spellings.

Owns both, and checks of single settings against what a file holds. Which settings a format can have is the format's own
to know (`gptq`, `awq`, `compressed_tensors`).
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jetserve.checkpoint.base import CheckpointError
from jetserve.checkpoint.files import read_json
from jetserve.quantize.qarray import INTEGER_RANGE

CONFIG_KEYS = ("quantization_config", "compression_config")
"""In config.json."""
FILES = ("quantize_config.json", "quant_config.json")
"""Beside it, where it has neither."""

_SYNONYMS = {
    "w_bit": "bits",
    "wbits": "bits",
    "q_group_size": "group_size",
    "groupsize": "group_size",
    "checkpoint_format": "format",
    "version": "format",
}
_FLAGS_OF_OTHERS = ("is_marlin_format",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings under one spelling.

    Attributes:
      where: the file and the key, for errors.
      method: as they name it ("gptq"); None where they do not.
      fields: bits, group_size, sym, format, desc_act, dynamic, …
    """

    where: str
    method: str | None = None
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def text(self, key: str, absent: str) -> str:
        """A setting that is a word, in lower case."""
        value = self.fields.get(key)
        return absent if value is None else str(value).lower()

    def expect_only(self, key: str, allowed: Sequence[str], *, absent: str) -> None:
        """Raises CheckpointError if a setting has a value that is not read."""
        found = self.text(key, absent)
        if found not in allowed:
            raise CheckpointError(
                f"{self.where} has the {key} {found!r}, which is not read; expected {' or '.join(allowed)}. Use the"
                " model in another format, or its unquantized checkpoint"
            )

    @property
    def symmetric(self) -> bool | None:
        """None where nothing is said."""
        return self.fields.get("sym")

    def layer_bits(self, layer: str, found: float, where: str) -> int:
        """The bits of a layer: those that the shapes of its tensors give, if they are the settings' too.

        Raises:
          CheckpointError: if they are not 4 or 8, or contradict the settings.
        """
        said = self._of_layer(layer, "bits")
        if said not in (None, *INTEGER_RANGE):
            raise CheckpointError(f"{self.where} says {said} bits for {layer}; expected 4 or 8. Others are not read")
        if found not in INTEGER_RANGE or (said is not None and found != said):
            raise CheckpointError(
                f"{where} is packed as for {found:g} bits; expected {said if said is not None else '4 or 8'}, by"
                f" {self.where}. The settings are of another checkpoint, or of a format that is not read"
            )
        return int(found)

    def check_group_size(self, layer: str, contracted: int, groups: int, where: str) -> None:
        """Checks how many groups a layer with so many input features has.

        Raises:
          CheckpointError: if the group size that the settings say does not divide them, or gives another number.
        """
        said = self._of_layer(layer, "group_size")
        if said is None:
            return
        if not isinstance(said, int) or isinstance(said, bool) or (said < 1 and said != -1):
            raise CheckpointError(f"{self.where} says group_size {said!r} for {layer}; expected -1, or 1 or more")
        size = contracted if said == -1 or (said > contracted and groups == 1) else said
        if contracted % size:
            raise CheckpointError(
                f"{layer} has {contracted} input features, which the group_size {said} of {self.where} does not divide;"
                " expected groups of one size. Quantize the model again with a group size that divides them"
            )
        if contracted // size != groups:
            raise CheckpointError(
                f"{where} has {groups} groups; expected {contracted // size}, of {said} by {self.where}. The settings"
                " are of another checkpoint"
            )

    def _of_layer(self, layer: str, key: str) -> Any:
        """A setting of one layer, by GPTQModel's `dynamic`: the first regular expression that matches its name."""
        dynamic: Mapping[str, Mapping[str, Any]] = self.fields.get("dynamic") or {}
        for pattern, changes in dynamic.items():
            if not pattern.startswith("-:") and re.match(pattern.removeprefix("+:"), layer):
                return changes.get(key, self.fields.get(key))
        return self.fields.get(key)


def find_settings(folder: Path, config: Mapping[str, Any]) -> Settings | None:
    """The settings in a folder whose config.json is `config`; None if there are none.

    Raises:
      CheckpointError: if they cannot be understood.
    """
    for key in CONFIG_KEYS:
        if config.get(key) is not None:
            return _settings(config[key], f"{folder / 'config.json'}: {key}")
    for name in FILES:
        if (folder / name).is_file():
            return _settings(read_json(folder / name), str(folder / name))
    return None


def without_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """A model's config that says nothing of quantization."""
    return {key: value for key, value in config.items() if key not in CONFIG_KEYS}


def _settings(found: Any, where: str) -> Settings:
    if not isinstance(found, dict):
        raise CheckpointError(f"{where} is {found!r}; expected an object with the settings of quantized weights")
    for key in _FLAGS_OF_OTHERS:
        if found.get(key):
            raise CheckpointError(f"{where} has {key}, which is not read. Use the model in the plain GPTQ format")
    method = found.get("quant_method")
    fields: dict[str, Any] = {}
    for key, value in found.items():
        name = _SYNONYMS.get(str(key), str(key))
        if key == "version" and ("format" in found or "config_groups" in found):
            continue  # of the tool, not of the format
        if key == "zero_point":
            name, value = "sym", None if value is None else not value
        if value is not None and fields.get(name, value) != value:
            raise CheckpointError(
                f"{where} gives {name} twice, as {fields[name]!r} and {value!r}; expected one of them"
            )
        if value is not None:
            fields[name] = value
    return Settings(where=where, method=None if method is None else str(method).lower(), fields=fields)
