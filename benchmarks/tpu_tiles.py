"""Finds the tiles of the TPU's quantized matmul, with the real TPU compiler and without a TPU: writes `tiles.json`.

  python benchmarks/tpu_tiles.py [v5e v6e ...]

The kernel's cycles are the compiler's static profile of it: its schedule, run through a model of the chip's memory.
The profile fails on most of XLA's own operations, so the einsum's are the estimates that stand in its compiled program,
which leave out weights that are fetched ahead: where the kernel wins, it wins against a number that flatters the
einsum.
"""

import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jetserve.config import MeshConfig
from jetserve.kernels.quantized_matmul import pallas_tpu, tiles, xla
from jetserve.parallel.mesh import make_mesh
from jetserve.plan import hlo
from jetserve.plan.chips import CHIPS, find_topology
from jetserve.quantize.qarray import DEFAULT_BLOCK_SIZE, QArray, Weight

TYPES = {"int4_blockwise": jnp.int4, "int8_blockwise": jnp.int8}
CANDIDATES = {
    32: [(32, 1024, 2048), (32, 2048, 2048)],
    128: [(128, 1024, 2048)],
    512: [(256, 512, 1024)],
}
"""By rows of x: (rows, columns, depth) of tiles."""
PROFILE = re.compile(r'hlo_op_name: "quantized_matmul[^"]*"\s+estimated_cycles: (\d+)')
TILES = Path(tiles.__file__).with_name("tiles.json")


def weight(name: str, shape: tuple[int, int] = tiles.SHAPE) -> QArray:
    """A weight of one of the types, in shapes."""
    (K, N), g = shape, DEFAULT_BLOCK_SIZE
    return QArray(
        values=jax.ShapeDtypeStruct((K // g, g, N), TYPES[name]),
        scale=jax.ShapeDtypeStruct((K // g, N), jnp.float32),
        block_size=g,
    )


def compile_for(chip: str, function: Any, rows: int, w: Weight) -> tuple[str, str]:
    """The device's kind and the program's text, of function(x [rows, K], w)."""
    mesh = make_mesh(MeshConfig(), find_topology(f"{chip}:{CHIPS[chip].sizes[0]}").devices[:1])
    everywhere = NamedSharding(mesh, PartitionSpec())
    shapes = jax.ShapeDtypeStruct((rows, w.shape[0]), jnp.bfloat16), w
    placed = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere), shapes)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        text = jax.jit(function).lower(*placed).compile().as_text()
    assert text is not None
    return mesh.devices.flat[0].device_kind, text


def einsums(chip: str) -> dict[str, Any]:
    """The einsum's cycles by type and rows, and the device's kind."""
    found: dict[str, Any] = {}
    for name, rows in itertools.product(TYPES, CANDIDATES):
        found["kind"], text = compile_for(chip, xla.run, rows, weight(name))
        found.setdefault(name, {})[rows] = hlo.cycles(text, unknown_trips=1)
    return found


def kernels(chip: str, folder: Path) -> dict[str, dict[int, list[dict[str, int]]]]:
    """The kernel's candidates by type and rows, with the cycles of each whose tiles the chip can hold."""
    found: dict[str, dict[int, list[dict[str, int]]]] = {}
    for name, rows in itertools.product(TYPES, CANDIDATES):
        for T, columns, depth in CANDIDATES[rows]:
            tile = tiles.Tile(most_rows=rows, rows=T, columns=columns, depth=depth, cycles=0, einsum_cycles=0)

            def multiply(x: jax.Array, w: QArray, tile: tiles.Tile = tile) -> jax.Array:
                return pallas_tpu.multiply(x, w, tile=tile, out_dtype=jnp.dtype(jnp.bfloat16))

            try:
                compile_for(chip, multiply, rows, weight(name))
            except jax.errors.JaxRuntimeError as error:
                print(f"{chip} {name} {rows}: {T}x{columns}x{depth} fails: {str(error)[:100]}", file=sys.stderr)
                continue
            cycles = profiled(folder)
            print(f"{chip} {name} {rows}: {T}x{columns}x{depth} takes {cycles}", file=sys.stderr)
            candidate = dataclasses.asdict(dataclasses.replace(tile, cycles=cycles))
            found.setdefault(name, {}).setdefault(rows, []).append(candidate)
    return found


def profiled(folder: Path) -> int:
    """Cycles of the kernels that were compiled since the last call."""
    cycles = 0
    for path in folder.iterdir():
        cycles += sum(int(found) for found in PROFILE.findall(path.read_text()))
        path.unlink()
    return cycles


def in_processes(script: str, chip: str) -> tuple[Any, Any]:
    """What a script's "einsums" and "kernels" find, each in a process: the profile is a setting of all of one."""
    only_compile = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}

    def run(*arguments: str, **more: str) -> Any:
        command = [sys.executable, script, *arguments]
        done = subprocess.run(command, env=os.environ | only_compile | more, stdout=subprocess.PIPE, check=True)
        return json.loads(done.stdout.splitlines()[-1])

    with tempfile.TemporaryDirectory() as folder:
        profile = f"--xla_jf_dump_static_llo_profile_to={folder}"
        return run("einsums", chip), run("kernels", chip, folder, LIBTPU_INIT_ARGS=profile)


def best_tiles(chip: str) -> tuple[str, dict[str, list[dict[str, int]]]]:
    """The device's kind, and by type the best tile for each number of rows."""
    einsum, kernel = in_processes(__file__, chip)
    best = {
        name: [
            min(candidates, key=lambda tile: tile["cycles"]) | {"einsum_cycles": einsum[name][rows]}
            for rows, candidates in by_rows.items()
        ]
        for name, by_rows in kernel.items()
    }
    return einsum["kind"], best


def main() -> None:
    match sys.argv[1:]:
        case ["einsums", chip]:
            print(json.dumps(einsums(chip)))
        case ["kernels", chip, folder]:
            print(json.dumps(kernels(chip, Path(folder))))
        case chips:
            for chip in chips or CHIPS:
                table = json.loads(TILES.read_text())
                kind, best = best_tiles(chip)
                TILES.write_text(json.dumps(table | {kind: best}, indent=1) + "\n")


if __name__ == "__main__":
    main()
