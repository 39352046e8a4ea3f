"""Host memory of loading a large checkpoint over many devices: a synthetic Llama in GPTQ's int4, written and loaded.

    python benchmarks/loading_memory.py --layers=32

Devices are simulated on the CPU, so that what they hold is the process's memory too; the rest of its peak is what
loading takes on a host. The goal: under twice a device's share. Weights are random, and kept in the form for TPUs. The
last line of standard output is a JSON object.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import own_process
from safetensors.numpy import save_file

GIB = 2**30
GROUP = 128
NIBBLE_ZEROS = np.uint32(0x77777777)
"""A word of the zeros of symmetric weights."""


def write(folder: Path, args: argparse.Namespace) -> None:
    """Makes the checkpoint: a file a layer, and one of the embedding and the head."""
    rng = np.random.default_rng(0)
    shapes = {f"self_attn.{name}_proj": (args.hidden, args.hidden) for name in "qkvo"}
    shapes |= {f"mlp.{name}_proj": (args.hidden, args.mlp) for name in ("gate", "up")}
    shapes["mlp.down_proj"] = (args.mlp, args.hidden)
    norm = np.ones(args.hidden, np.float16)
    files: dict[str, dict[str, np.ndarray]] = {}
    for i in range(args.layers):
        prefix = f"model.layers.{i}"
        norms = ("input_layernorm", "post_attention_layernorm")
        tensors = {f"{prefix}.{name}.weight": norm for name in norms}
        for name, (K, N) in shapes.items():
            words = rng.integers(0, 2**32, (K // 8, N), np.uint32)
            tensors[f"{prefix}.{name}.qweight"] = words.view(np.int32)
            tensors[f"{prefix}.{name}.qzeros"] = np.full((K // GROUP, N // 8), NIBBLE_ZEROS).view(np.int32)
            tensors[f"{prefix}.{name}.scales"] = np.full((K // GROUP, N), 0.002, np.float16)
        files[name := f"layer-{i:03}.safetensors"] = dict.fromkeys(tensors)  # type: ignore[arg-type]
        save_file(tensors, folder / name)
    table = rng.standard_normal((args.vocabulary, args.hidden), np.float32).astype(np.float16)
    last = {"model.embed_tokens.weight": table, "lm_head.weight": table, "model.norm.weight": norm}
    files["others.safetensors"] = last
    save_file(last, folder / "others.safetensors")
    weight_map = {tensor: file for file, tensors in files.items() for tensor in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    heads = args.hidden // 128
    config = {
        "model_type": "llama",
        "hidden_size": args.hidden,
        "intermediate_size": args.mlp,
        "num_hidden_layers": args.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "vocab_size": args.vocabulary,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False},
    }
    (folder / "config.json").write_text(json.dumps(config))


def load(folder: Path) -> None:
    """In a process of its own: loads over all devices, and says what that took."""
    import jax
    import jax.numpy as jnp

    from jetserve.checkpoint.load import load_model
    from jetserve.config import MeshConfig
    from jetserve.kernels import select
    from jetserve.models import base
    from jetserve.parallel.mesh import make_mesh
    from jetserve.parallel.rules import bytes_per_device

    mesh = make_mesh(MeshConfig())
    before = peak_bytes()
    start = time.perf_counter()
    with select.choose(quantized_matmul="xla"):  # the CPU's others make float32 of what is spread over devices
        loaded = load_model(folder, mesh=mesh, dtype=jnp.dtype("bfloat16"))
    parameters = base.parameters(loaded.model, base.find("llama").WEIGHTS)
    leaves = jax.block_until_ready(jax.tree.leaves([p.variable.get_value() for p in parameters]))
    share = sum(map(bytes_per_device, leaves))
    held, peak = share * jax.device_count(), peak_bytes()
    report = {
        "devices": jax.device_count(),
        "seconds": round(time.perf_counter() - start, 1),
        "weights": loaded.report.weights,
        "held_bytes": held,
        "device_share_bytes": share,
        "peak_memory_bytes": peak,
        "before_loading_bytes": before,
        "host_bytes": peak - before - held,
        "goal_bytes": 2 * share,
    }
    print(
        f"{loaded.report.weights / 1e9:.2f} billion weights over {jax.device_count()} devices, {share / GIB:.2f} GiB on"
        f" each, in {report['seconds']} s; on the host besides: {(peak - before - held) / GIB:.2f} GiB",
        file=sys.stderr,
    )
    print(json.dumps(report))


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Writes, and loads in another process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--mlp", type=int, default=11008)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--folder", type=Path, default=None, help="where to write (unset: a temporary folder)")
    parser.add_argument("--load", type=Path, default=None, help="load what was written, and do nothing else")
    args = parser.parse_args()
    if args.load is not None:
        load(args.load)
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        own_process.run(write, Path(folder), args)
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={args.devices}"
        command = [sys.executable, __file__, f"--load={folder}"]
        done = subprocess.run(command, env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}, check=False)
    raise SystemExit(done.returncode)


if __name__ == "__main__":
    main()
