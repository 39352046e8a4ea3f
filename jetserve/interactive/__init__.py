"""A chat in the terminal: lines in, streamed answers out, over one engine.

`conversation` owns the history, `chat` the commands and the answers, `terminal` standard input and output.
"""

from jetserve.interactive.terminal import run

__all__ = ["run"]
