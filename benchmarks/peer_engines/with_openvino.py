"""OpenVINO GenAI behind the protocol: its continuous batching pipeline, prefix caching off."""

from collections.abc import Sequence

import numpy as np
import openvino
import openvino_genai
import protocol


class OpenVino(protocol.PeerEngine):
    """One pipeline for one prompt and for batches."""

    def __init__(self, *, limits: dict[str, int], model: str, threads: int) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        most = max(limits["prompt_length"], limits["batch_size"] * limits["batch_length"])
        scheduler.max_num_batched_tokens = most
        scheduler.max_num_seqs = limits["batch_size"]
        scheduler.enable_prefix_caching = False
        scheduler.cache_size = 1  # GB
        properties = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "KV_CACHE_PRECISION": "f16"}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            model, scheduler_config=scheduler, device="CPU", properties=properties
        )
        self._handles: list[openvino_genai.GenerationHandle] = []
        self._requests = 0
        self.version = f"openvino-genai {openvino_genai.__version__}"

    def start(self, prompts: Sequence[Sequence[int]], tokens: int) -> None:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.do_sample, config.ignore_eos = tokens + len(prompts), False, True
        self._handles = []
        for prompt in prompts:
            ids = openvino.Tensor(np.asarray([prompt], np.int64))
            self._handles.append(self._pipeline.add_request(self._requests, ids, config))
            self._requests += 1

    def step(self) -> list[int | None]:
        self._pipeline.step()
        found: list[int | None] = []
        for handle in self._handles:
            outputs = handle.read() if handle.can_read() else {}
            found.append(next((output.generated_ids[-1] for output in outputs.values()), None))
        return found

    def end(self) -> None:
        for handle in self._handles:
            handle.stop()
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        self._handles = []


if __name__ == "__main__":
    protocol.serve(OpenVino)
