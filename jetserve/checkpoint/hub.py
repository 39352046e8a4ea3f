"""Checkpoints and data sets by hub id: fetched with huggingface_hub into its own cache.

Owns which files are wanted. Knows nothing of what is in them.
"""

import re
from pathlib import Path

from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from jetserve.checkpoint.base import CheckpointError

WANTED = ["*.safetensors", "*.json", "*.model", "*.jinja", "tokenizer*"]
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def local_path(path: str | Path) -> Path:
    """`path` itself if it is there, else the local copy of the hub repository of that id.

    Raises:
      CheckpointError: if it is neither, or the hub cannot be reached.
    """
    local = Path(path).expanduser()
    if local.exists():
        return local
    if not HUB_ID.fullmatch(str(path)):
        raise CheckpointError(f"{path} does not exist; expected a folder, a GGUF file, or a hub id such as owner/name")
    try:
        return Path(snapshot_download(str(path), allow_patterns=WANTED))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"{path} does not exist here, and as a hub id it cannot be fetched: {str(error).splitlines()[0]}. Check the"
            " name and the network, or log in with `hf auth login` if it is gated"
        ) from error


def local_texts(path: Path) -> Path:
    """`path` itself if it is there or cannot be on the hub, else the local copy of `owner/name/FILE` of a data set.

    Raises:
      ValueError: if the hub cannot be reached, or has no such file.
    """
    repository, file = "/".join(path.parts[:2]), "/".join(path.parts[2:])
    if path.exists() or not file or not HUB_ID.fullmatch(repository):
        return path
    try:
        return Path(hf_hub_download(repository, file, repo_type="dataset"))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(
            f"{path} does not exist here, and as a file of a data set on the hub, {repository}, it cannot be fetched:"
            f" {str(error).splitlines()[0]}. Check the name and the network"
        ) from error
