"""jetserve behind the protocol: whole engine steps, scheduling and sampling among them, as a user gets them."""

from collections.abc import Sequence

import jax
import protocol

from jetserve.config import CacheConfig, EngineConfig, ModelSource
from jetserve.default_model import default_cache_dir
from jetserve.engine import build
from jetserve.types import Request, SamplingParams


class Jetserve(protocol.PeerEngine):
    """One set of weights behind two engines: one prompt at a time, and batches."""

    def __init__(self, *, limits: dict[str, int], quantize_type: str) -> None:
        source = ModelSource(cache_dir=default_cache_dir(), quantize_type=quantize_type)
        cache = CacheConfig(prefix_caching=False)
        single, batch = (EngineConfig(max_sequences=size, cache=cache) for size in (1, limits["batch_size"]))
        build.use_cache_dir(source.cache_dir)
        loaded = build.load_source(source, single)
        self._engines = [
            build.make_engine(loaded, single, max_length=limits["prompt_length"]),
            build.make_engine(loaded, batch, max_length=limits["batch_length"]),
        ]
        self._tokenizer = build.tokenizer_of(loaded)
        self._engine = self._engines[0]
        self._count = self._requests = 0
        self.version = f"jax {jax.__version__}"

    def start(self, prompts: Sequence[Sequence[int]], tokens: int) -> None:
        self._engine = self._engines[0 if len(prompts) == 1 else 1]
        self._count = len(prompts)
        self._requests += 1
        # Prompts are prefilled one after the other, and the first go on meanwhile.
        params = SamplingParams(max_tokens=tokens + len(prompts), temperature=0, ignore_eos=True)
        for i, prompt in enumerate(prompts):
            request = Request(request_id=f"{self._requests}-{i}", prompt_token_ids=tuple(prompt), sampling=params)
            self._engine.submit(request)

    def step(self) -> list[int | None]:
        found: list[int | None] = [None] * self._count
        for output in self._engine.step():
            if output.token_ids:
                found[int(output.request_id.split("-")[1])] = output.token_ids[-1]
        return found

    def end(self) -> None:
        for i in range(self._count):
            self._engine.cancel(f"{self._requests}-{i}")

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)


if __name__ == "__main__":
    protocol.serve(Jetserve)
