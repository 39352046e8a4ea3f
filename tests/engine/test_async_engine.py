"""The asyncio front of the engine: every way in which a caller, or the engine itself, can go wrong.

A fake engine, whose steps the test can hold or let fail, shows the order of things; the tiny model shows the truth.
"""

import asyncio
import collections
import contextlib
import dataclasses
import re
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import pytest

from jetserve.checkpoint.load import LoadedModel, load_model
from jetserve.config import CacheConfig, EngineConfig, MeshConfig
from jetserve.engine.async_engine import MAX_FAILURES, AsyncEngine, DrainingError, EngineDeadError, State
from jetserve.engine.engine import Engine
from jetserve.engine.runner import Runner
from jetserve.engine.scheduler import QueueFullError
from jetserve.parallel.mesh import make_mesh
from jetserve.testing import make_tiny_checkpoint
from jetserve.types import EngineStats, FinishReason, Guide, GuideKind, Request, RequestOutput, SamplingParams, Usage

TIMEOUT = 60.0


class FakeEngine:
    """Answers a prompt (t, …) with tokens t, t, …: one a step for every request. It checks that one thread calls it.

    `gate`: a step waits for it. `guide_gate`: so does the compiling of a guide; "(" is a bad one. `fail_next`: how many
    steps are to raise.
    """

    def __init__(self, max_queue: int = 1000) -> None:
        self.config = EngineConfig(max_queue=max_queue)
        self.gate = threading.Event()
        self.gate.set()
        self.guide_gate = threading.Event()
        self.guide_gate.set()
        self.prepared: set[Guide] = set()
        self.in_step = threading.Event()
        self.fail_next = 0
        self.steps = 0
        self.live: dict[str, tuple[Request, int]] = {}
        self.finished: collections.Counter[FinishReason] = collections.Counter()
        self._threads: set[int] = set()

    @property
    def has_work(self) -> bool:
        return bool(self.live)

    def is_prepared(self, request: Request) -> bool:
        return request.sampling.guide is None or request.sampling.guide in self.prepared

    def prepare(self, request: Request) -> None:
        assert threading.get_ident() not in self._threads
        assert self.guide_gate.wait(TIMEOUT)
        assert request.sampling.guide is not None
        if request.sampling.guide.source == "(":
            raise ValueError("bad guide")
        self.prepared.add(request.sampling.guide)

    def submit(self, request: Request) -> None:
        self._threads.add(threading.get_ident())
        if request.prompt_token_ids[0] < 0:
            raise ValueError("negative token")
        if request.prompt_token_ids[0] == 666:
            raise KeyError("a bug")
        if len(self.live) >= self.config.max_queue:
            raise QueueFullError("full")
        self.live[request.request_id] = (request, 0)

    def step(self) -> list[RequestOutput]:
        self._threads.add(threading.get_ident())
        assert len(self._threads) == 1
        self.steps += 1
        self.in_step.set()
        assert self.gate.wait(TIMEOUT)
        self.in_step.clear()
        if self.fail_next:
            self.fail_next -= 1
            raise RuntimeError("injected")
        outputs = []
        for request, done in list(self.live.values()):
            self.live[request.request_id] = (request, done + 1)
            if done + 1 == request.sampling.max_tokens:
                outputs += self._end(request.request_id, FinishReason.LENGTH)
            else:
                outputs += self._outputs(request, None)
        return outputs

    def cancel(self, request_id: str) -> list[RequestOutput]:
        return self._end(request_id, FinishReason.CANCELLED) if request_id in self.live else []

    def fail(self, error: str) -> list[RequestOutput]:
        return [out for name in list(self.live) for out in self._end(name, FinishReason.ERROR, error)]

    def _end(self, request_id: str, reason: FinishReason, error: str | None = None) -> list[RequestOutput]:
        request, _ = self.live.pop(request_id)
        self.finished[reason] += request.sampling.n
        return self._outputs(request, reason, error)

    def _outputs(self, request: Request, reason: FinishReason | None, error: str | None = None) -> list[RequestOutput]:
        tokens = request.prompt_token_ids[:1] if reason in (None, FinishReason.LENGTH) else ()
        return [
            RequestOutput(
                request_id=request.request_id,
                index=index,
                text="",
                token_ids=tokens,
                finish_reason=reason,
                usage=Usage(prompt_tokens=1, output_tokens=1),
                error=error,
            )
            for index in range(request.sampling.n)
        ]

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self.live),
            waiting=0,
            pages_used=len(self.live),
            pages_total=1000,
            steps=self.steps,
            prompt_tokens=0,
            output_tokens=0,
            prefix_cache_hit_tokens=0,
            preemptions=0,
            finished=dict(self.finished),
        )


def request_of(
    name: str, token: int = 7, max_tokens: int = 3, n: int = 1, regex: str | None = None, **fields: Any
) -> Request:
    guide = None if regex is None else Guide(kind=GuideKind.REGEX, source=regex)
    sampling = SamplingParams(max_tokens=max_tokens, n=n, temperature=0, ignore_eos=True, guide=guide)
    return Request(request_id=name, prompt_token_ids=(token,), sampling=sampling, **fields)


async def answer(engine: AsyncEngine, request: Request) -> list[RequestOutput]:
    return [output async for output in engine.generate(request)]


def tokens_of(outputs: list[RequestOutput], index: int = 0) -> list[int]:
    return [token for output in outputs if output.index == index for token in output.token_ids]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT):
        while not condition():
            await asyncio.sleep(0.001)


def play(fake: Any, scene: Callable[[AsyncEngine], Awaitable[None]]) -> AsyncEngine:
    """Runs a scene against an engine, which is then stopped whatever came of it."""

    async def main() -> AsyncEngine:
        engine = AsyncEngine(cast(Engine, fake))
        try:
            async with asyncio.timeout(TIMEOUT):
                await scene(engine)
        finally:
            if isinstance(fake, FakeEngine):
                fake.gate.set()
                fake.guide_gate.set()
            await engine.stop()
        return engine

    return asyncio.run(main())


@pytest.fixture
def fake() -> FakeEngine:
    return FakeEngine()


def test_every_sample_of_a_request_reaches_its_caller(fake: FakeEngine) -> None:
    async def scene(engine: AsyncEngine) -> None:
        outputs = await answer(engine, request_of("a", token=5, n=3))
        assert [tokens_of(outputs, index) for index in range(3)] == [[5, 5, 5]] * 3
        assert sum(output.finished for output in outputs) == 3
        assert engine.stats().finished == {FinishReason.LENGTH: 3}

    play(fake, scene)


def test_an_idle_engine_takes_no_steps_and_no_time(fake: FakeEngine) -> None:
    async def scene(engine: AsyncEngine) -> None:
        await answer(engine, request_of("a"))
        steps, used = fake.steps, time.process_time()
        await asyncio.sleep(0.3)
        assert fake.steps == steps
        assert time.process_time() - used < 0.1

    play(fake, scene)


@pytest.mark.parametrize(("token", "error"), [(-1, ValueError), (666, KeyError)])
def test_what_submit_raises_is_its_callers_alone(fake: FakeEngine, token: int, error: type[Exception]) -> None:
    async def scene(engine: AsyncEngine) -> None:
        good = asyncio.create_task(answer(engine, request_of("good", max_tokens=50)))
        with pytest.raises(error):
            await answer(engine, request_of("bad", token=token))
        assert tokens_of(await good) == [7] * 50
        assert engine.is_ready

    play(fake, scene)


def test_a_request_id_in_use_is_refused_and_its_owner_unharmed(fake: FakeEngine) -> None:
    async def scene(engine: AsyncEngine) -> None:
        fake.gate.clear()
        first = asyncio.create_task(answer(engine, request_of("same", token=1)))
        await until(fake.in_step.is_set)
        second = asyncio.create_task(answer(engine, request_of("same", token=2, n=2)))
        await asyncio.sleep(0.01)
        fake.gate.set()
        with pytest.raises(ValueError, match="'same' is in use"):
            await second
        assert tokens_of(await first) == [1, 1, 1]
        assert tokens_of(await answer(engine, request_of("same", token=3))) == [3, 3, 3]

    play(fake, scene)


def test_a_flood_is_refused_at_once_and_the_rest_is_served() -> None:
    fake = FakeEngine(max_queue=10)

    async def scene(engine: AsyncEngine) -> None:
        fake.gate.clear()
        first = asyncio.create_task(answer(engine, request_of("first")))
        await until(fake.in_step.is_set)
        flood = [asyncio.create_task(answer(engine, request_of(f"r{i}"))) for i in range(500)]
        await until(lambda: sum(task.done() for task in flood) == 490)  # while the step still hangs
        assert engine.stats().waiting == 10
        fake.gate.set()
        results = await asyncio.gather(*flood, return_exceptions=True)
        assert tokens_of(await first) == [7] * 3
        served = [result for result in results if isinstance(result, list)]
        assert len(served) >= 9  # the engine's own bound counts the one that runs
        assert all(tokens_of(result) == [7] * 3 for result in served)
        assert all(isinstance(r, QueueFullError) for r in results if not isinstance(r, list))

    play(fake, scene)


@pytest.mark.parametrize("way", ["close", "cancel"])
def test_a_caller_that_leaves_ends_its_request_before_the_next_step(fake: FakeEngine, way: str) -> None:
    async def scene(engine: AsyncEngine) -> None:
        other = asyncio.create_task(answer(engine, request_of("other", max_tokens=300)))
        if way == "close":
            async with contextlib.aclosing(engine.generate(request_of("gone", max_tokens=10**6))) as outputs:
                async for _ in outputs:
                    break
        else:
            task = asyncio.create_task(answer(engine, request_of("gone", max_tokens=10**6)))
            await until(lambda: "gone" in fake.live)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await until(lambda: "gone" not in fake.live)
        assert tokens_of(await other) == [7] * 300
        assert engine.stats().finished[FinishReason.CANCELLED] == 1
        assert engine.stats().pages_used == 0

    play(fake, scene)


def test_a_request_cancelled_before_the_engine_saw_it_never_runs(fake: FakeEngine) -> None:
    async def scene(engine: AsyncEngine) -> None:
        fake.gate.clear()
        first = asyncio.create_task(answer(engine, request_of("first")))
        await until(fake.in_step.is_set)
        task = asyncio.create_task(answer(engine, request_of("gone")))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        fake.gate.set()
        await first
        await engine.drain(1)
        assert fake.finished == {FinishReason.LENGTH: 1}

    play(fake, scene)


def test_a_reader_that_never_reads_stalls_nobody(fake: FakeEngine) -> None:
    async def scene(engine: AsyncEngine) -> None:
        slow = engine.generate(request_of("slow", token=4, max_tokens=200))
        outputs = [await anext(slow)]
        assert tokens_of(await answer(engine, request_of("quick", max_tokens=300))) == [7] * 300
        assert "slow" not in fake.live  # it has run to its end meanwhile
        outputs += [output async for output in slow]
        assert tokens_of(outputs) == [4] * 200

    play(fake, scene)


def test_callers_whose_event_loop_died_are_cancelled(fake: FakeEngine) -> None:
    async def scene(engine: AsyncEngine) -> None:
        async def begin() -> None:
            await anext(engine.generate(request_of("lost", max_tokens=10**6)))

        loop = asyncio.new_event_loop()
        await asyncio.to_thread(loop.run_until_complete, begin())
        loop.close()
        await until(lambda: not fake.live)
        assert tokens_of(await answer(engine, request_of("next"))) == [7] * 3

    play(fake, scene)


def test_a_failed_step_ends_what_it_touched_and_the_engine_goes_on(fake: FakeEngine) -> None:
    async def scene(engine: AsyncEngine) -> None:
        for _ in range(MAX_FAILURES + 2):  # never so many in a row
            fake.gate.clear()
            touched = [asyncio.create_task(answer(engine, request_of(f"t{i}", max_tokens=9))) for i in range(3)]
            await until(fake.in_step.is_set)
            waits = asyncio.create_task(answer(engine, request_of("waits", token=8)))
            await asyncio.sleep(0.01)
            fake.fail_next = 1
            fake.gate.set()
            results = await asyncio.gather(*touched)
            ends = {outputs[-1].finish_reason for outputs in results}
            assert ends <= {FinishReason.ERROR, FinishReason.LENGTH}
            assert FinishReason.ERROR in ends
            assert all("injected" in (o.error or "") for r in results for o in r if o.finish_reason.value == "error")
            assert tokens_of(await waits) == [8] * 3
        assert engine.is_ready

    play(fake, scene)


def test_failures_in_a_row_end_the_engine_and_everyone_is_told(fake: FakeEngine) -> None:
    async def scene(engine: AsyncEngine) -> None:
        fake.fail_next = MAX_FAILURES
        for i in range(MAX_FAILURES - 1):
            outputs = await answer(engine, request_of(f"r{i}"))
            assert outputs[-1].finish_reason is FinishReason.ERROR
            assert engine.is_live
        fake.gate.clear()
        last = asyncio.create_task(answer(engine, request_of("last")))
        await until(fake.in_step.is_set)
        waits = asyncio.create_task(answer(engine, request_of("waits")))
        await asyncio.sleep(0.01)
        fake.gate.set()
        assert (await last)[-1].finish_reason is FinishReason.ERROR
        for task in (waits, asyncio.create_task(answer(engine, request_of("later")))):
            with pytest.raises(EngineDeadError, match="injected"):
                await task
        assert (engine.is_live, engine.is_ready) == (False, False)
        await engine.drain(TIMEOUT)  # returns

    play(fake, scene)


def test_a_failure_while_failing_ends_the_engine_too(fake: FakeEngine) -> None:
    async def scene(engine: AsyncEngine) -> None:
        fake.fail_next = 1
        fake.fail = None
        with pytest.raises(EngineDeadError, match="NoneType"):
            await answer(engine, request_of("a"))
        assert engine.state is State.DEAD

    play(fake, scene)


def test_drain_lets_requests_finish_and_takes_no_more(fake: FakeEngine) -> None:
    async def scene(engine: AsyncEngine) -> None:
        fake.gate.clear()
        running = asyncio.create_task(answer(engine, request_of("running", max_tokens=20)))
        await until(fake.in_step.is_set)
        waiting = asyncio.create_task(answer(engine, request_of("waiting", max_tokens=20)))
        await asyncio.sleep(0.01)
        drained = asyncio.create_task(engine.drain(TIMEOUT))
        await until(lambda: not engine.is_ready)
        with pytest.raises(DrainingError):
            await answer(engine, request_of("late"))
        assert engine.is_live
        assert not drained.done()
        fake.gate.set()
        await drained
        for task in (running, waiting):
            assert tokens_of(await task) == [7] * 20

    play(fake, scene)


def test_drain_cancels_what_outlasts_its_grace(fake: FakeEngine) -> None:
    async def scene(engine: AsyncEngine) -> None:
        long = asyncio.create_task(answer(engine, request_of("long", max_tokens=10**6, n=2)))
        await until(lambda: bool(fake.live))
        fake.in_step.clear()
        fake.gate.clear()
        await until(fake.in_step.is_set)
        unseen = asyncio.create_task(answer(engine, request_of("unseen", n=2)))
        await asyncio.sleep(0.01)
        drained = asyncio.create_task(engine.drain(0.02))
        await until(lambda: engine._shared.cancel_all)
        fake.gate.set()
        await drained
        for task in (long, unseen):
            outputs = await task
            assert [output.finish_reason for output in outputs[-2:]] == [FinishReason.CANCELLED] * 2
        assert engine.stats().pages_used == 0

    play(fake, scene)


def test_stop_during_a_step_ends_all_with_a_reason(fake: FakeEngine) -> None:
    async def scene(engine: AsyncEngine) -> None:
        fake.gate.clear()
        running = asyncio.create_task(answer(engine, request_of("running", max_tokens=10**6)))
        await until(fake.in_step.is_set)
        unseen = asyncio.create_task(answer(engine, request_of("unseen")))
        stopped = asyncio.create_task(engine.stop())
        await until(lambda: engine.state is State.STOPPED)
        fake.gate.set()
        await stopped
        assert (await running)[-1].finish_reason is FinishReason.CANCELLED
        with pytest.raises(DrainingError):
            await unseen
        with pytest.raises(DrainingError):
            await answer(engine, request_of("late"))
        await engine.stop()  # again, to no effect

    play(fake, scene)


def test_a_step_that_never_ends_does_not_keep_callers(fake: FakeEngine) -> None:
    async def scene(engine: AsyncEngine) -> None:
        fake.gate.clear()
        stuck = asyncio.create_task(answer(engine, request_of("stuck")))
        await until(fake.in_step.is_set)
        await engine.stop(timeout_seconds=0.05)
        with pytest.raises(EngineDeadError, match=r"0\.05 seconds"):
            await stuck

    play(fake, scene)


# Guides, which take a while to compile.


def test_a_guide_is_compiled_while_others_are_served(fake: FakeEngine) -> None:
    async def scene(engine: AsyncEngine) -> None:
        fake.guide_gate.clear()
        guided = asyncio.create_task(answer(engine, request_of("guided", token=5, regex="a")))
        await until(lambda: engine.stats().waiting == 1)
        for i in range(3):
            assert tokens_of(await answer(engine, request_of(f"r{i}"))) == [7] * 3
        assert not guided.done()
        fake.guide_gate.set()
        assert tokens_of(await guided) == [5] * 3

    play(fake, scene)


def test_a_guide_that_is_there_waits_for_no_other(fake: FakeEngine) -> None:
    async def scene(engine: AsyncEngine) -> None:
        assert tokens_of(await answer(engine, request_of("first", regex="a"))) == [7] * 3
        fake.guide_gate.clear()
        slow = [asyncio.create_task(answer(engine, request_of(f"slow{i}", regex=f"b{i}"))) for i in range(10)]
        await until(lambda: engine.stats().waiting == 10)
        assert tokens_of(await answer(engine, request_of("again", regex="a"))) == [7] * 3
        fake.guide_gate.set()
        await asyncio.gather(*slow)

    play(fake, scene)


def test_a_bad_guide_is_refused_at_once_whatever_the_engine_does(fake: FakeEngine) -> None:
    async def scene(engine: AsyncEngine) -> None:
        fake.gate.clear()
        good = asyncio.create_task(answer(engine, request_of("good", max_tokens=50)))
        await until(fake.in_step.is_set)
        with pytest.raises(ValueError, match="bad guide"):
            await answer(engine, request_of("bad", regex="("))
        assert engine.stats().waiting == 0
        fake.gate.set()
        assert tokens_of(await good) == [7] * 50

    play(fake, scene)


def test_guides_that_are_compiled_count_as_waiting() -> None:
    fake = FakeEngine(max_queue=10)

    async def scene(engine: AsyncEngine) -> None:
        fake.guide_gate.clear()
        flood = [asyncio.create_task(answer(engine, request_of(f"r{i}", regex="a"))) for i in range(100)]
        await until(lambda: sum(task.done() for task in flood) == 90)
        with pytest.raises(QueueFullError):
            await answer(engine, request_of("plain"))
        fake.guide_gate.set()
        results = await asyncio.gather(*flood, return_exceptions=True)
        assert sum(isinstance(result, list) for result in results) == 10
        assert engine.stats().waiting == 0

    play(fake, scene)


@pytest.mark.parametrize("way", ["leave", "drain", "stop"])
def test_a_request_that_ends_while_its_guide_is_compiled(fake: FakeEngine, way: str) -> None:
    async def scene(engine: AsyncEngine) -> None:
        fake.guide_gate.clear()
        guided = asyncio.create_task(answer(engine, request_of("guided", n=2, regex="a")))
        await until(lambda: engine.stats().waiting == 1)
        if way == "leave":
            guided.cancel()
            await until(lambda: not engine._shared.open)
        elif way == "drain":
            await engine.drain(0)
            outputs = await guided
            assert [(o.index, o.finish_reason) for o in outputs] == [(i, FinishReason.CANCELLED) for i in range(2)]
        else:
            await engine.stop()
            with pytest.raises(DrainingError):
                await guided
        fake.guide_gate.set()
        await until(lambda: engine.stats().waiting == 0)
        assert (fake.live, fake.finished) == ({}, {})

    play(fake, scene)


# The tiny model.


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = make_tiny_checkpoint(tmp_path_factory.mktemp("async") / "tiny")
    return load_model(folder, mesh=make_mesh(MeshConfig(), jax.devices()[:1]), dtype=jnp.float32)


@pytest.fixture(scope="module")
def runner(loaded: LoadedModel) -> Runner:
    config = EngineConfig(
        max_sequences=8, max_length=64, max_step_tokens=32, max_queue=400, cache=CacheConfig(page_size=8)
    )
    return Runner(loaded.model, config, make_mesh(config.mesh, jax.devices()[:1]))


@pytest.fixture
def real(loaded: LoadedModel, runner: Runner) -> Engine:
    assert loaded.tokenizer is not None
    return Engine(runner, loaded.tokenizer)


def real_request(i: int, **fields: Any) -> Request:
    sampling = SamplingParams(max_tokens=4 + i % 5, temperature=0.8 * (i % 2), seed=i, ignore_eos=True)
    prompt = tuple(3 + (7 * i + 11 * j) % 300 for j in range(1 + i % 20))
    return Request(request_id=f"r{i}", prompt_token_ids=prompt, sampling=sampling, **fields)


def test_two_hundred_at_once_each_get_their_own_answer(real: Engine) -> None:
    requests = [real_request(i) for i in range(200)]
    alone: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for output in Engine(real.runner, real.tokenizer).run(requests):
        alone[output.request_id] += output.token_ids

    async def scene(engine: AsyncEngine) -> None:
        answers = await asyncio.gather(*(answer(engine, request) for request in requests))
        for request, outputs in zip(requests, answers, strict=True):
            assert {output.request_id for output in outputs} == {request.request_id}
            assert tokens_of(outputs) == alone[request.request_id]
            assert outputs[-1].finish_reason is FinishReason.LENGTH
        assert engine.stats().pages_used == 0
        assert engine.stats().running == engine.stats().waiting == 0

    play(real, scene)


def test_guided_answers_reach_their_callers(real: Engine) -> None:
    def guided(name: str, regex: str, seed: int = 0) -> Request:
        guide = Guide(kind=GuideKind.REGEX, source=regex)
        return Request(
            request_id=name, prompt_token_ids=(5, 6), sampling=SamplingParams(max_tokens=40, seed=seed, guide=guide)
        )

    async def scene(engine: AsyncEngine) -> None:
        results = await asyncio.gather(
            *(answer(engine, guided(f"g{i}", f"[a-z]{{{i + 1}}}", seed=i)) for i in range(12)),
            answer(engine, guided("bad", "(")),
            answer(engine, real_request(3)),
            return_exceptions=True,
        )
        for i, outputs in enumerate(results[:12]):
            assert isinstance(outputs, list)
            assert re.fullmatch(f"[a-z]{{{i + 1}}}", "".join(output.text for output in outputs))
            assert outputs[-1].finish_reason is FinishReason.STOP
        assert isinstance(results[12], ValueError)
        assert isinstance(results[13], list)
        assert len(tokens_of(results[13])) == 7

    play(real, scene)


def test_random_leavers_leave_no_page_behind(real: Engine) -> None:
    async def take(engine: AsyncEngine, i: int) -> int:
        count = 0
        async with contextlib.aclosing(engine.generate(real_request(i))) as outputs:
            async for output in outputs:
                count += len(output.token_ids)
                if i % 3 == 0:
                    break
        return count

    async def scene(engine: AsyncEngine) -> None:
        counts = await asyncio.gather(*(take(engine, i) for i in range(60)))
        await engine.drain(TIMEOUT)
        assert all(count >= 1 if i % 3 == 0 else count == 4 + i % 5 for i, count in enumerate(counts))
        assert engine.stats().pages_used == 0

    play(real, scene)


def test_a_deadline_that_has_passed_ends_the_request(real: Engine) -> None:
    async def scene(engine: AsyncEngine) -> None:
        late, good = await asyncio.gather(
            answer(engine, real_request(1, deadline=time.monotonic() - 1)), answer(engine, real_request(2))
        )
        assert late[-1].finish_reason is FinishReason.DEADLINE
        assert good[-1].finish_reason is FinishReason.LENGTH

    play(real, scene)


def test_a_step_of_the_real_engine_that_raises_is_survived(real: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    step, calls = real.runner.run, []

    def fails_at_the_third(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 3:
            raise FloatingPointError("injected")
        return step(*args)

    monkeypatch.setattr(real.runner, "run", fails_at_the_third)

    async def scene(engine: AsyncEngine) -> None:
        failed = await answer(engine, real_request(4))
        assert failed[-1].finish_reason is FinishReason.ERROR
        assert "injected" in (failed[-1].error or "")
        assert len(tokens_of(await answer(engine, dataclasses.replace(real_request(4), request_id="again")))) == 8
        assert engine.stats().pages_used == 0

    play(real, scene)


def test_a_prompt_that_cannot_fit_is_refused_with_the_limit(real: Engine) -> None:
    async def scene(engine: AsyncEngine) -> None:
        with pytest.raises(ValueError, match="at most 63"):
            await answer(engine, Request(request_id="long", prompt_token_ids=(5,) * 100))

    play(real, scene)
