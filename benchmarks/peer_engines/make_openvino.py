"""A GGUF file as an OpenVINO model of int4 weights: python make_openvino.py IN.gguf OUT_FOLDER

Takes `pip install optimum-intel openvino-genai nncf torch transformers gguf accelerate`. The weights are dequantized
and then quantized anew, in groups of 64, as `optimum-cli export openvino --weight-format int4 --group-size 64` does.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import transformers


def main() -> None:
    """By way of a Hugging Face folder in float32."""
    source, target = Path(sys.argv[1]).resolve(), sys.argv[2]
    with tempfile.TemporaryDirectory() as folder:
        for loader, settings in (
            (transformers.AutoModelForCausalLM, {"dtype": torch.float32}),
            (transformers.AutoTokenizer, {}),
        ):
            loader.from_pretrained(source.parent, gguf_file=source.name, **settings).save_pretrained(folder)
        command = [sys.executable, "-m", "optimum.commands.optimum_cli", "export", "openvino", "--model", folder]
        command += ["--task", "text-generation-with-past", "--weight-format", "int4", "--group-size", "64", target]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
