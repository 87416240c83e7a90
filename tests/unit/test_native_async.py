"""The asyncio face of the native engine: abort, pause, resume, errors, closing."""

import asyncio
import contextlib

import pytest
from test_native_models import engine_for, greedy, prompts_of, reference, tiny_model

from verl_fl.rollout.native.async_engine import AsyncEngine
from verl_fl.rollout.native.sampling import SamplingParams


@contextlib.asynccontextmanager
async def serving(**kwargs):
    engine = AsyncEngine(engine_for(tiny_model(), **kwargs), num_threads=1)
    try:
        yield engine
    finally:
        engine.close()


async def until(condition):
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("the condition did not come true in 5 s")


def start(engine, prompt, params, request_id="a"):
    return asyncio.ensure_future(engine.generate(prompt, params, request_id))


async def test_concurrent_requests_get_their_own_answers():
    prompts = prompts_of(3, 17, 9, 30, 1)
    async with serving() as engine:
        tasks = [engine.generate(p, greedy(10), str(i)) for i, p in enumerate(prompts)]
        outputs = await asyncio.gather(*tasks)
        assert [o.token_ids for o in outputs] == [reference(tiny_model(), p, 10) for p in prompts]
        assert engine.stats()["generated_tokens"] == 50 and engine.stats()["running"] == 0


async def test_pause_delivers_partial_output_and_its_continuation_equals_the_whole():
    prompt = prompts_of(6)[0]
    expected = reference(tiny_model(), prompt, 100)
    async with serving() as engine:
        task = start(engine, prompt, greedy(100))
        await until(lambda: engine.stats()["steps"] > 5)
        assert await engine.pause() == ["a"]
        partial = await task
        assert partial.finish_reason == "abort" and 0 < len(partial.token_ids) < 100
        rest = start(engine, prompt + partial.token_ids, greedy(100 - len(partial.token_ids)), "b")
        await until(lambda: engine.stats()["parked"] == 1)
        assert not rest.done()
        await engine.resume()
        assert partial.token_ids + (await rest).token_ids == expected


async def test_paused_engine_can_reject_at_once():
    async with serving() as engine:
        await engine.pause(reject=True)
        output = await engine.generate([5], SamplingParams(max_tokens=3, logprobs=True), "a")
        assert (output.finish_reason, output.token_ids, output.log_probs) == ("abort", [], [])
        await engine.resume()
        assert len((await engine.generate([5], greedy(3), "a")).token_ids) == 3


async def test_abort_ends_the_named_and_the_parked():
    async with serving() as engine:
        first, second = start(engine, [5, 6], greedy(120), "a"), start(engine, [7], greedy(4), "b")
        await until(lambda: engine.stats()["steps"] > 1)
        assert await engine.abort(["a", "unknown"]) == ["a"]
        assert (await first).finish_reason == "abort" and (await second).finish_reason == "length"
        await engine.pause()
        parked = start(engine, [5], greedy(4), "c")
        await until(lambda: engine.stats()["parked"] == 1)
        assert await engine.abort() == ["c"]
        assert (await parked).token_ids == []


async def test_cancelled_call_frees_its_slot():
    async with serving() as engine:
        task = start(engine, [5, 6], greedy(125))
        await until(lambda: engine.stats()["running"] == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await engine.abort([])
        assert engine.stats()["running"] == 0
        assert len((await engine.generate([5], greedy(3), "a")).token_ids) == 3


async def test_error_in_a_step_reaches_every_waiter_and_the_engine_goes_on():
    native = engine_for(tiny_model())
    engine = AsyncEngine(native)
    try:
        forward = native._decode

        def broken():
            raise ArithmeticError("the chip is on fire")

        native._decode = broken
        results = await asyncio.gather(
            *(engine.generate(p, greedy(5), str(i)) for i, p in enumerate(prompts_of(3, 4))), return_exceptions=True
        )
        for result in results:
            assert isinstance(result, RuntimeError) and "on fire" in str(result)
            assert isinstance(result.__cause__, ArithmeticError)
        native._decode = forward
        assert (await engine.generate([5], greedy(5), "again")).token_ids == reference(tiny_model(), [5], 5)
    finally:
        engine.close()


async def test_bad_requests_fail_alone():
    async with serving() as engine:
        good = start(engine, [5], greedy(60), "a")
        await until(lambda: engine.stats()["steps"] > 0)
        with pytest.raises(ValueError, match="in flight already"):
            await engine.generate([5], greedy(5), "a")
        with pytest.raises(ValueError, match="prompt of 0 tokens"):
            await engine.generate([], greedy(5), "b")
        assert len((await good).token_ids) == 60


async def test_weights_change_under_a_running_request():
    weights = {k: v.clone() for k, v in tiny_model(seed=1).state_dict().items()}
    async with serving() as engine:
        task = start(engine, [5, 6], greedy(120))
        await until(lambda: engine.stats()["steps"] > 3)
        await engine.update_weights(weights.items(), version=2)
        output = await task
        assert len(output.token_ids) == 120 and output.weight_version_max == 2 and output.num_preempted == 1
        await engine.sleep(2)
        with pytest.raises(RuntimeError, match="incomplete"):
            await engine.generate([5], greedy(1), "b")
        await engine.wake()
        await engine.update_weights(weights.items(), version=3)
        assert (await engine.generate([5], greedy(4), "b")).token_ids == reference(tiny_model(seed=1), [5], 4)


async def test_closing_fails_whoever_waits_and_later_calls():
    async with serving() as engine:
        await engine.pause()
        parked = start(engine, [5], greedy(4))
        await until(lambda: engine.stats()["parked"] == 1)
        engine.close()
        with pytest.raises(RuntimeError, match="closed"):
            await parked
        with pytest.raises(RuntimeError, match="after close"):
            await engine.generate([5], greedy(4), "b")
