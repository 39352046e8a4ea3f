"""One of two processes that run models together, four devices each: run by `test_processes.py`.

    python two_processes.py COORDINATOR_ADDRESS PROCESS_ID FOLDER

Process 0 asks an engine over all eight devices, and one over a device of its own, and compares.
"""

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from parallel.eight_devices import EVEN, LAYERS, REFERENCE, Weights, check_same

from jetserve.checkpoint.load import LoadedModel, load_model
from jetserve.config import CacheConfig, EngineConfig, MeshConfig, ProcessesConfig
from jetserve.engine.runner import Runner
from jetserve.kernels import select
from jetserve.parallel import processes
from jetserve.parallel.mesh import make_mesh
from jetserve.parallel.processes import Alone, Follower, Leader, Processes
from jetserve.quantize.qarray import QUANTIZE_TYPES
from jetserve.testing import make_tiny_checkpoint

CONFIG = EngineConfig(max_sequences=2, max_length=64, max_step_tokens=16, cache=CacheConfig(page_size=8))


class Holder:
    """The model that a process runs now; does what the runner is told."""

    def __init__(self, folder: Path, devices: list[jax.Device], processes: Processes) -> None:
        self._folder, self._processes = folder, processes
        self._mesh = make_mesh(MeshConfig(), devices)

    def load(self, quantize_type: str) -> tuple[LoadedModel, Runner]:
        weights = Weights(quantize_type=quantize_type)
        loaded = load_model(self._folder, mesh=self._mesh, dtype=jnp.float32, **weights.settings)
        self.runner = Runner(loaded.model, CONFIG, self._mesh, self._processes)
        return loaded, self.runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)


class Load:
    """A command, to load a model."""

    def __init__(self, quantize_type: str) -> None:
        self._type = quantize_type

    def __call__(self, holder: Holder) -> tuple[LoadedModel, Runner]:
        return holder.load(self._type)


def main() -> None:
    address, process_id, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    config = ProcessesConfig(coordinator_address=address, num_processes=2, process_id=process_id)
    processes.initialize(config)
    assert (jax.device_count(), jax.local_device_count()) == (8, 4)
    with select.choose(**REFERENCE):
        if process_id == 0:
            lead(config, folder)
        else:
            follower = Follower(config, {})
            follower.follow(Holder(folder, jax.devices(), Alone()))


def lead(config: ProcessesConfig, folder: Path) -> None:
    make_tiny_checkpoint(folder, num_hidden_layers=LAYERS, **EVEN | {"num_key_value_heads": 2})
    leader = Leader(config, {})
    together = Holder(folder, jax.devices(), leader)
    alone = Holder(folder, jax.local_devices()[:1], Alone())
    for name in QUANTIZE_TYPES:
        many = leader.run(Load(name), together)
        leaf = jax.tree.leaves(many[1]._step.params)[0]
        assert not leaf.is_fully_addressable
        check_same(alone.load(name), many)
        print("the same:", name, flush=True)
    leader.stop()


if __name__ == "__main__":
    main()
