"""Making what many processes want to have, in one of them while the others wait.

Knows nothing of what is made.
"""

import contextlib
import fcntl
import logging
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

LOCK = "lock"
ROOM_PREFIX = "making-"


@contextlib.contextmanager
def room(folder: Path, doing: str) -> Iterator[Path]:
    """An empty folder within `folder`, for one process at a time; whoever waited may find that all is made.

    What processes left that were killed goes. A process that ends, by whatever means, holds nothing.

    Args:
      folder: made unless it is there.
      doing: what is done in it, such as "fetching a model", for those who wait.

    Raises:
      OSError: if nothing can be written in `folder`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for another process, which is %s", doing)
            fcntl.flock(file, fcntl.LOCK_EX)
        for left in folder.glob(f"{ROOM_PREFIX}*"):
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=ROOM_PREFIX) as made:
            yield Path(made)
