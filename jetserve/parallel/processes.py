"""Several processes, one a host, that run one model together: how they find each other and keep in step.

Every process must start the same programs in the same order, or all wait for ever. So process 0 decides, and tells the
others what it is about to run over a connection to each; they do nothing else. Where a process is lost, the connections
to it end, and with them all others. Knows nothing of what is run.
"""

import concurrent.futures
import contextlib
import hmac
import json
import logging
import os
import pickle
import queue
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from jetserve.config import ProcessesConfig

logger = logging.getLogger(__name__)

START_SECONDS = 300
"""How long the first process to start waits for the last."""
STOP_SECONDS = 60
"""How long one that has ended its work waits for the others to end theirs."""
FAREWELL_SECONDS = 30
"""What process 0 has to tell its callers that another process is lost; it ends then, whatever it waits for."""
KEY_BYTES, PORT_BYTES = 16, 2

Target = TypeVar("Target")
Command = Callable[[Target], Any]
"""What to do with the object that every process has of its own: picklable, such as `operator.methodcaller`."""


Settings = Mapping[str, str]
"""What every process must have been started with, by name."""


class Processes(Protocol):
    """Those that run a command together, seen from the one that decides.

    Attributes:
      lost: has a result, which says why, once one of the others has ended or cannot be reached.
    """

    lost: concurrent.futures.Future[str]

    def run(self, command: Command[Target], target: Target) -> Any:
        """Runs a command on the target of every process, and returns this one's result."""

    def stop(self) -> None:
        """Lets the others end, and waits for them."""


class Alone:
    """One process."""

    def __init__(self) -> None:
        self.lost: concurrent.futures.Future[str] = concurrent.futures.Future()

    def run(self, command: Command[Target], target: Target) -> Any:
        return command(target)

    def stop(self) -> None:
        pass


def initialize(config: ProcessesConfig) -> None:
    """Makes the devices of all processes known to each. To be called before jax looks for devices.

    Raises:
      RuntimeError: if the others cannot be reached.
    """
    logger.info("process %d of %d starts", config.process_id, config.num_processes)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM for itself
    jax.distributed.initialize(
        config.coordinator_address,
        config.num_processes,
        config.process_id,
        initialization_timeout=START_SECONDS,
        shutdown_timeout_seconds=STOP_SECONDS,
    )


def _secret(is_leader: bool, own: bytes) -> bytes:
    """The bytes of process 0, on every process: sent between the devices."""
    sent = multihost_utils.broadcast_one_to_all(np.frombuffer(own, np.uint8), is_source=is_leader)
    return np.asarray(sent).astype(np.uint8).tobytes()


def _keep_alive(connection: socket.socket) -> socket.socket:
    """So that a host that has vanished is noticed, and a small message never waits for the next."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, seconds in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)
    return connection


class Leader:
    """Process 0, with a connection to every other. See `Processes`."""

    def __init__(self, config: ProcessesConfig, settings: Settings) -> None:
        """Waits for all others.

        Raises:
          RuntimeError: if one does not come, or has other settings.
        """
        self.lost: concurrent.futures.Future[str] = concurrent.futures.Future()
        self._failed = self._stopped = False
        self._connections = _accept(config, settings)
        for process, connection in self._connections.items():
            watch = threading.Thread(target=self._watch, args=(process, connection), daemon=True)
            watch.start()

    def _watch(self, process: int, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection.recv(1)  # nothing is ever sent: it returns when the connection ends
        if self._stopped or self.lost.done():
            return
        message = f"process {process} of {len(self._connections) + 1} is lost: see its own log. All end"
        logger.error(message)
        self.lost.set_result(message)
        threading.Timer(FAREWELL_SECONDS, os._exit, (1,)).start()

    def run(self, command: Command[Target], target: Target) -> Any:
        """Raises what the command does, and

        RuntimeError: after a command has failed: others may have done it, or wait within it.
        OSError: if a process cannot be reached.
        """
        if self._failed:
            raise RuntimeError("a step failed, and other processes may not have: only a start of all of them helps")
        try:
            message = pickle.dumps(command)
            for connection in self._connections.values():
                connection.sendall(message)
            return command(target)
        except BaseException:
            self._failed = True
            raise

    def stop(self) -> None:
        self._stopped = True
        for connection in self._connections.values():
            connection.sendall(pickle.dumps(None))
        jax.distributed.shutdown()


def _accept(config: ProcessesConfig, settings: Settings) -> dict[int, socket.socket]:
    """A connection to every other process, by its number."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    connections: dict[int, socket.socket] = {}
    with socket.create_server(("", 0), family=family, dualstack_ipv6=both) as server:
        server.settimeout(START_SECONDS)
        key = secrets.token_bytes(KEY_BYTES)
        _secret(True, key + server.getsockname()[1].to_bytes(PORT_BYTES))
        while len(connections) < config.num_processes - 1:
            connection, address = server.accept()
            connection.settimeout(START_SECONDS)
            with connection.makefile("rb") as file:
                if not hmac.compare_digest(file.read(KEY_BYTES), key):
                    logger.warning("a connection from %s has not the key of this start, and is refused", address[0])
                    connection.close()
                    continue
                hello = json.loads(file.readline())
            _check_settings(hello["process_id"], hello["settings"], settings)
            connections[hello["process_id"]] = _keep_alive(connection)
    return connections


def _check_settings(process: int, found: Settings, expected: Settings) -> None:
    if found == expected:
        return
    differing = sorted(name for name in expected if found.get(name) != expected[name])
    raise RuntimeError(
        f"process {process} was started with other flags than process 0, or another checkpoint: "
        + ", ".join(f"{name} is {found.get(name)} there, {expected[name]} here" for name in differing)
        + "; expected the same on all"
    )


class Follower:
    """Any other process, which does what process 0 says."""

    def __init__(self, config: ProcessesConfig, settings: Settings) -> None:
        """Connects to process 0.

        Raises:
          OSError: if it cannot be reached.
        """
        secret = _secret(False, bytes(KEY_BYTES + PORT_BYTES))
        key, port = secret[:KEY_BYTES], int.from_bytes(secret[KEY_BYTES:])
        host = config.coordinator_address.rpartition(":")[0].strip("[]")
        self._connection = _keep_alive(socket.create_connection((host, port), timeout=START_SECONDS))
        hello = {"process_id": config.process_id, "settings": settings}
        self._connection.sendall(key + json.dumps(hello).encode() + b"\n")
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        """In a thread of its own: the other may wait within a command for a process that is lost."""
        with self._connection.makefile("rb") as file:
            try:
                while (command := pickle.load(file)) is not None:
                    self._commands.put(command)
            except (EOFError, OSError, pickle.UnpicklingError):
                logger.error("process 0 has ended without a word: see its own log. This one ends too")
                logging.shutdown()
                os._exit(1)
        self._commands.put(None)

    def follow(self, target: Target) -> None:
        """Runs what process 0 runs, until that stops."""
        while (command := self._commands.get()) is not None:
            command(target)
        jax.distributed.shutdown()
