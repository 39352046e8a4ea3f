"""llama.cpp behind the protocol, through llama-cpp-python's low-level interface: sequences share one `llama_decode`.

A token is the largest logit, found with numpy, which costs less than llama.cpp's own samplers.
"""

import ctypes
from collections.abc import Sequence

import llama_cpp
import numpy as np
import protocol


class Llama(protocol.PeerEngine):
    """One model, and a context that is made for the number of sequences and their length."""

    def __init__(self, *, limits: dict[str, int], model: str, threads: int) -> None:
        self._silence = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._silence, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(model.encode(), params)
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {model}")
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._threads = threads
        self._limits = limits
        most = max(limits["prompt_length"], limits["batch_size"] * limits["batch_length"])
        self._batch = llama_cpp.llama_batch_init(most, 0, 1)
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._waiting: list[Sequence[int]] = []
        self._tokens: list[int] = []
        self._lengths: list[int] = []
        self.version = f"llama-cpp-python {llama_cpp.__version__}"

    def _context(self, sequences: int) -> ctypes.c_void_p:
        if sequences not in self._contexts:
            params = llama_cpp.llama_context_default_params()
            limits = self._limits
            params.n_ctx = limits["prompt_length"] if sequences == 1 else limits["batch_length"] * sequences
            params.n_batch = params.n_ctx
            params.n_seq_max = sequences
            params.n_threads = params.n_threads_batch = self._threads
            params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
            params.kv_unified = False
            self._contexts[sequences] = llama_cpp.llama_init_from_model(self._model, params)
        return self._contexts[sequences]

    def start(self, prompts: Sequence[Sequence[int]], tokens: int) -> None:
        self._ctx = self._context(len(prompts))
        self._waiting = list(prompts)

    def step(self) -> list[int | None]:
        entries = self._waiting or [[token] for token in self._tokens]
        if self._waiting:
            self._lengths = [0] * len(entries)
        batch, used, last = self._batch, 0, []
        for sequence, tokens in enumerate(entries):
            for i, token in enumerate(tokens):
                batch.token[used] = token
                batch.pos[used] = self._lengths[sequence] + i
                batch.n_seq_id[used] = 1
                batch.seq_id[used][0] = sequence
                batch.logits[used] = i == len(tokens) - 1
                used += 1
            self._lengths[sequence] += len(tokens)
            last.append(used - 1)
        batch.n_tokens = used
        if status := llama_cpp.llama_decode(self._ctx, batch):
            raise RuntimeError(f"llama_decode gave {status}")
        self._waiting = []
        self._tokens = [self._best(i) for i in last]
        return list(self._tokens)

    def _best(self, i: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._ctx, i)
        return int(np.argmax(np.ctypeslib.as_array(logits, shape=(self._vocabulary,))))

    def end(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._ctx), True)


if __name__ == "__main__":
    protocol.serve(Llama)
