"""What tests over several devices, or several processes, start them with."""

import os
import socket


def environment_of_devices(count: int) -> dict[str, str]:
    """For a process with so many CPU devices, which must be asked for before jax starts."""
    flags = (
        os.environ.get("XLA_FLAGS", ""),
        f"--xla_force_host_platform_device_count={count}",
        # A busy machine runs some devices long after others, and XLA would end the process after 40 seconds.
        "--xla_cpu_collective_call_terminate_timeout_seconds=1200",
        "--xla_cpu_collective_timeout_seconds=1200",
    )
    return {**os.environ, "XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
