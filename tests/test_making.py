"""One process makes what several want: the others wait, and what killed ones left goes."""

import fcntl
import threading
from pathlib import Path

import pytest

from jetserve import making


def test_one_makes_it_while_the_others_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = threading.Semaphore(0)
    monkeypatch.setattr(making.logger, "info", lambda *_: waiting.release())
    made: list[str] = []
    wanted = tmp_path / "folder" / "wanted"

    def make(name: str) -> None:
        with making.room(wanted.parent, "making it") as room:
            if not wanted.exists():
                made.append(name)
                (room / "half").touch()
                (room / "half").rename(wanted)

    wanted.parent.mkdir()
    threads = [threading.Thread(target=make, args=(name,)) for name in "ab"]
    with (wanted.parent / making.LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for thread in threads:
            thread.start()
        for _ in threads:
            assert waiting.acquire(timeout=60)
        assert not made
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert {path.name for path in wanted.parent.iterdir()} == {making.LOCK, "wanted"}


def test_what_killed_processes_left_goes(tmp_path: Path) -> None:
    left = tmp_path / f"{making.ROOM_PREFIX}killed"
    left.mkdir()
    (left / "half").touch()
    with making.room(tmp_path, "making it") as room:
        assert list(room.iterdir()) == []
        assert not left.exists()
