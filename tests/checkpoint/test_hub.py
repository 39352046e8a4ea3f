"""What is not here is looked for on the hub, where its name can be one there."""

from pathlib import Path

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from jetserve.checkpoint import hub


def test_files_of_data_sets_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fetch(repository: str, file: str, *, repo_type: str) -> str:
        asked.append((repository, file, repo_type))
        return str(tmp_path / "copy")

    monkeypatch.setattr(hub, "hf_hub_download", fetch)
    assert hub.local_texts(Path("owner/name/raw/train.jsonl")) == tmp_path / "copy"
    assert asked == [("owner/name", "raw/train.jsonl", "dataset")]


def test_what_is_here_or_cannot_be_there_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    here = Path("owner/name/train.txt")
    here.parent.mkdir(parents=True)
    here.write_text("text")
    for path in (here, tmp_path / "none.txt", Path("none.txt"), Path("folder/none.txt"), Path("../a/b/none.txt")):
        assert hub.local_texts(path) == path


def test_a_hub_out_of_reach_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: str, **others: str) -> str:
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(hub, "hf_hub_download", fail)
    with pytest.raises(ValueError, match="data set on the hub, owner/name, it cannot be fetched: no connection"):
        hub.local_texts(Path("owner/name/train.txt"))
