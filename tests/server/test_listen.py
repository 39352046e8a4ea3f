"""What keeps a server from its port: keys, certificates and addresses that cannot be used."""

import re
import socket
from pathlib import Path

import pytest

from jetserve.config import ServerConfig
from jetserve.server import auth, listen


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read (No such file or directory); expected a text file"),
        (b"\n", "holds no key; expected"),
        (b"\xff\xfe\x00", "is no text"),
        ("schlüssel".encode(), "holds no key; expected"),
    ],
)
def test_a_key_file_that_cannot_be_used_is_named(tmp_path: Path, content: bytes | None, words: str) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(f"--api_key_file {file} {words}")):
        auth.key_of(ServerConfig(api_key_file=file))


def test_both_missing_files_of_a_certificate_are_named(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert", tmp_path / "key"
    with pytest.raises(ValueError, match="expected a PEM certificate and its key") as refused:
        listen.certificate_and_key(ServerConfig(tls_cert_file=cert, tls_key_file=key))
    for flag, path in (("--tls_cert_file", cert), ("--tls_key_file", key)):
        assert f"{flag} {path} cannot be read (No such file or directory)" in str(refused.value)


def test_what_is_no_certificate_is_refused(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert", tmp_path / "key"
    for file in (cert, key):
        file.write_text("junk")
    words = f"--tls_cert_file {cert} and --tls_key_file {key} cannot be used"
    with pytest.raises(ValueError, match=re.escape(words)):
        listen.certificate_and_key(ServerConfig(tls_cert_file=cert, tls_key_file=key))


def test_an_address_that_cannot_be_had_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for host, its_port in (("127.0.0.1", port), ("192.0.2.1", 0)):
            words = rf"cannot listen on {host}:{its_port} \(.+\); expected .*\(--some_port\)"
            with pytest.raises(RuntimeError, match=words):
                listen.bind(host, its_port, flag="--some_port")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_sockets_name_their_protocol(host: str) -> None:
    with listen.bind(host, 0, flag="--some_port") as bound:
        assert bound.proto == socket.IPPROTO_TCP  # asyncio turns Nagle's algorithm off only then
