"""A server of a tiny model as a process of its own."""

import contextlib
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc

from jetserve.server.proto.jetstream_pb2_grpc import OrchestratorStub

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 600.0


class Process:
    """A server on a port of its own; `log` is what it has written so far."""

    def __init__(
        self,
        checkpoint: Path,
        *flags: str,
        command: tuple[str, ...] = ("run_server.py",),
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        settings = [
            "--grpc_port=0",
            "--http_port=0",
            "--batch_size=1",
            "--max_step_tokens=16",
            "--max_cache_length=512",
            *flags,
        ]
        self.process = subprocess.Popen(
            [sys.executable, *command, f"--checkpoint_path={checkpoint}", *settings],
            cwd=ROOT,
            env={**environment, "JAX_PLATFORMS": "cpu"},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.log = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log += line

    def wait_for(self, pattern: str) -> re.Match[str]:
        end = time.monotonic() + TIMEOUT
        while (found := re.search(pattern, self.log)) is None:
            assert time.monotonic() < end, self.log
            assert self.process.poll() is None, self.log
            time.sleep(0.02)
        return found

    def stub(self, stack: contextlib.ExitStack) -> OrchestratorStub:
        port = self.wait_for(r"ready: gRPC on 127\.0\.0\.1:(\d+)")[1]
        return OrchestratorStub(stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{port}")))

    def http(self) -> str:
        """Where it serves HTTP, which it does before the model is loaded."""
        return self.wait_for(r"HTTP on (http://127\.0\.0\.1:\d+)")[1]

    def wait(self) -> int:
        code = self.process.wait(TIMEOUT)
        self._reader.join(TIMEOUT)
        return code


def start(stack: contextlib.ExitStack, *arguments: Any, **settings: Any) -> Process:
    process = Process(*arguments, **settings)
    stack.callback(process.process.wait)
    stack.callback(process.process.kill)
    return process
