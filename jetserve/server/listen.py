"""What a server needs before it takes connections: an address of its own, and a certificate with its key.

Knows nothing of protocols.
"""

import socket
import ssl
from pathlib import Path

from jetserve.config import ServerConfig


def bind(host: str, port: int, *, flag: str, backlog: int = 0) -> socket.socket:
    """A socket that listens; port 0 lets the system choose one.

    Args:
      host: a name or an address, of IPv4 or IPv6.
      port: of TCP.
      flag: which set the port, for the message.
      backlog: connections that may wait to be taken.

    Raises:
      RuntimeError: if the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio sends what it has at once: else small answers wait for the client's delayed ACK.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen(backlog)
    except OSError as error:
        bound.close()
        raise RuntimeError(
            f"cannot listen on {host}:{port} ({error.strerror}); expected an address of this machine (--host), and a"
            f" port that no other process has ({flag})"
        ) from error
    bound.setblocking(False)
    return bound


def certificate_and_key(config: ServerConfig) -> tuple[bytes, bytes] | None:
    """The PEM texts that a configuration names; None if it wants no TLS.

    Raises:
      ValueError: if one cannot be read, or they do not belong together; the message names the flags.
    """
    if config.tls_cert_file is None or config.tls_key_file is None:
        return None
    named = {"--tls_cert_file": config.tls_cert_file, "--tls_key_file": config.tls_key_file}
    problems = [problem for flag, path in named.items() if (problem := _problem_of(flag, path))]
    if problems:
        raise ValueError(f"{'; '.join(problems)}; expected a PEM certificate and its key")
    try:
        # The password keeps OpenSSL from asking for one in the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.tls_cert_file, config.tls_key_file, password="")
    except ssl.SSLError as error:
        raise ValueError(
            f"--tls_cert_file {config.tls_cert_file} and --tls_key_file {config.tls_key_file} cannot be used ({error});"
            " expected a PEM certificate and its key, without a password"
        ) from error
    return config.tls_cert_file.read_bytes(), config.tls_key_file.read_bytes()


def _problem_of(flag: str, path: Path) -> str | None:
    try:
        path.read_bytes()
    except OSError as error:
        return f"{flag} {path} cannot be read ({error.strerror})"
    return None
