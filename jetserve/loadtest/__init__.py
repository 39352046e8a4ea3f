"""Load on a server, and what its clients then see: request rates, latencies, goodput, failures.

`workload` says what is asked and when, `targets` sends it over gRPC or HTTP, `drive` keeps the time, `statistics`
counts, `report` shows. It measures from outside, so it takes neither jax nor an engine.
"""

from jetserve.loadtest.drive import run

__all__ = ["run"]
