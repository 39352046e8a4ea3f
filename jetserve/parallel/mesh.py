"""The device mesh: its axes and their type, decided once."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jetserve.config import MeshConfig

AXES = ("data", "tensor", "expert")


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh over `devices` (all of them unless given), with axes that the compiler propagates (AxisType.Auto).

    Raises:
      ValueError: if the axes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    others = config.data * config.expert
    tensor = config.tensor if config.tensor is not None else max(1, len(devices) // others)
    if config.data * tensor * config.expert != len(devices):
        raise ValueError(
            f"mesh of data={config.data} x tensor={tensor} x expert={config.expert} takes"
            f" {others * tensor} devices, but there are {len(devices)}; set the axes so that their product is that"
        )
    shape = (config.data, tensor, config.expert)
    return Mesh(np.asarray(devices).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))
