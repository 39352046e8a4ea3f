"""A GGUF file as Q4_0, which llama.cpp's kernels like best: python make_q4_0.py IN.gguf OUT.gguf"""

import ctypes
import sys

import llama_cpp


def main() -> None:
    """Weights go from the source's type to Q4_0 without their originals; the embedding keeps its Q8_0."""
    source, target = sys.argv[1:]
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0
    params.allow_requantize = True
    params.token_embedding_type = llama_cpp.GGML_TYPE_Q8_0
    if llama_cpp.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params)):
        raise SystemExit(f"llama.cpp could not quantize {source}")


if __name__ == "__main__":
    main()
