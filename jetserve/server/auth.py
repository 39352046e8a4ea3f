"""The key that clients must send, the same for every protocol: `authorization: Bearer KEY`."""

import hmac
from pathlib import Path

from jetserve.config import ServerConfig

EXPECTED = 'expected "authorization: Bearer KEY" with the right key'


def key_of(config: ServerConfig) -> str | None:
    """The key that a configuration names; None if everybody may in.

    Raises:
      ValueError: if its file cannot be read, or it is empty, or has characters that no header can carry.
    """
    if config.api_key_file is None:
        key, source = config.api_key, "--api_key"
    else:
        key, source = _text_of(config.api_key_file).strip(), f"--api_key_file {config.api_key_file}"
    if key is None:
        return None
    if not (key and key.isascii() and key.isprintable()):
        raise ValueError(f"{source} holds no key; expected one of printable ASCII characters")
    return key


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--api_key_file {file} cannot be read ({error.strerror}); expected a text file") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"--api_key_file {file} is no text ({error}); expected a key of ASCII characters") from error


def is_right(header: str | bytes, key: str) -> bool:
    """Whether the value of an authorization header carries `key`, in a time that does not tell how much of it."""
    found = header if isinstance(header, bytes) else header.encode()
    scheme, _, credentials = found.partition(b" ")
    return scheme.lower() == b"bearer" and hmac.compare_digest(credentials.strip(), key.encode())
