"""The native engine behind an asyncio face: one thread owns it, everything else posts to that thread."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from verl_fl.rollout.native.engine import NativeEngine
from verl_fl.rollout.native.request import RequestOutput
from verl_fl.rollout.native.sampling import SamplingParams


class AsyncEngine:
    """Runs a NativeEngine in its own thread. Methods may be called from any asyncio loop; each command runs between
    two steps, in the order given."""

    def __init__(self, engine: NativeEngine, *, num_threads: int | None = None) -> None:
        """num_threads: torch's intra-op threads for the engine's thread; None leaves torch's default."""
        self._engine, self._num_threads = engine, num_threads
        self._inbox: deque[tuple[Callable[[], Any], Future]] = deque()
        self._wakeup = threading.Condition()
        self._waiters: dict[str, Future] = {}
        self._parked: list[tuple[str, Sequence[int], SamplingParams]] = []
        self._paused = self._reject = self._closed = False
        self._counts = {"steps": 0, "generated_tokens": 0, "finished_requests": 0}
        self._thread = threading.Thread(target=self._run, name="verl_fl-native-engine", daemon=True)
        self._thread.start()

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, request_id: str) -> RequestOutput:
        """The finished (or aborted) output. A cancelled call aborts its request.

        Raises ValueError for a request that can never run, RuntimeError where the engine cannot generate or a step
        failed (its cause chained).
        """
        done: Future = Future()
        try:
            await self._call(lambda: self._submit(request_id, prompt_ids, params, done))
            return await asyncio.wrap_future(done)
        except asyncio.CancelledError:
            self._post(lambda: self._abort([request_id]))
            raise

    async def abort(self, request_ids: Iterable[str] | None = None) -> list[str]:
        """End the named requests (None: all), parked ones too; their waiters get the tokens so far. The ids ended."""
        ids = None if request_ids is None else list(request_ids)
        return await self._call(lambda: self._abort(ids))

    async def pause(self, *, reject: bool = False) -> list[str]:
        """Abort everything in flight; requests from now on wait for `resume`, or with reject return aborted at once."""

        def command() -> list[str]:
            ended = self._abort(None)
            self._paused, self._reject = True, reject
            return ended

        return await self._call(command)

    async def resume(self) -> None:
        """Take requests again, those first that waited since `pause`."""

        def command() -> None:
            self._paused = self._reject = False
            parked, self._parked = self._parked, []
            for request_id, prompt_ids, params in parked:
                try:
                    self._engine.add_request(request_id, prompt_ids, params)
                except Exception as error:
                    waiter = self._waiters.pop(request_id)
                    if waiter.set_running_or_notify_cancel():
                        waiter.set_exception(error)

        await self._call(command)

    async def update_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], *, version: int | None = None):
        """See `NativeEngine.update_weights`; the iterable is consumed in the engine's thread."""
        await self._call(lambda: self._engine.update_weights(named_tensors, version=version))

    async def update_lora(
        self,
        named_tensors: Iterable[tuple[str, torch.Tensor]],
        peft_config: Mapping[str, Any],
        *,
        version: int | None = None,
    ) -> None:
        """See `NativeEngine.update_lora`."""
        await self._call(lambda: self._engine.update_lora(named_tensors, peft_config, version=version))

    async def sleep(self, level: int = 1) -> None:
        """See `NativeEngine.sleep`. Requests in flight continue after `wake`; pause first to end them."""
        await self._call(lambda: self._engine.sleep(level))

    async def wake(self) -> None:
        """See `NativeEngine.wake`."""
        await self._call(self._engine.wake)

    async def reset_prefix_cache(self) -> None:
        """See `NativeEngine.reset_prefix_cache`."""
        await self._call(self._engine.reset_prefix_cache)

    def stats(self) -> dict[str, Any]:
        """Counters and gauges, read without waiting for the engine."""
        running, waiting = self._engine.num_requests()
        return {
            **self._counts,
            "running": running,
            "waiting": waiting,
            "parked": len(self._parked),
            "paused": self._paused,
            "weight_version": self._engine.weight_version,
        }

    def close(self) -> None:
        """Stop the thread; whoever still waits gets a RuntimeError. Idempotent."""
        with self._wakeup:
            self._closed = True
            self._wakeup.notify()
        if self._thread is not threading.current_thread():
            self._thread.join()

    # -- the caller's side --------------------------------------------------------------------------------------------

    def _post(self, command: Callable[[], Any]) -> Future:
        future: Future = Future()
        with self._wakeup:
            if self._closed:
                raise RuntimeError("the native engine was asked to work after close(). Build a new AsyncEngine.")
            self._inbox.append((command, future))
            self._wakeup.notify()
        return future

    async def _call(self, command: Callable[[], Any]) -> Any:
        return await asyncio.wrap_future(self._post(command))

    # -- the engine's thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
        while True:
            with self._wakeup:
                while not (self._closed or self._inbox or self._engine.has_work()):
                    self._wakeup.wait()
                if self._closed:
                    break
                commands, self._inbox = self._inbox, deque()
            for command, future in commands:
                self._execute(command, future)
            if self._engine.has_work():
                self._step()
        closed = RuntimeError("the native engine was closed while this request waited.")
        self._fail_all(closed)
        for _, future in self._inbox:
            if future.set_running_or_notify_cancel():
                future.set_exception(closed)

    def _execute(self, command: Callable[[], Any], future: Future) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(command())
        except BaseException as error:
            future.set_exception(error)

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
            self._counts["steps"] += 1
            self._deliver(outputs)
        except Exception as error:
            self._engine.abort()
            failure = RuntimeError(f"a step of the native engine failed: {error}")
            failure.__cause__ = error
            self._fail_all(failure)

    def _submit(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams, done: Future) -> None:
        if request_id in self._waiters:
            raise ValueError(f"request id {request_id!r} is in flight already: ids must be unique. Choose another.")
        if self._paused and self._reject:
            empty: list[float] | None = [] if params.logprobs else None
            output = RequestOutput(request_id=request_id, token_ids=[], log_probs=empty, finish_reason="abort")
            done.set_result(output)
            return
        if self._paused:
            self._parked.append((request_id, prompt_ids, params))
        else:
            self._engine.add_request(request_id, prompt_ids, params)
        self._waiters[request_id] = done

    def _abort(self, request_ids: list[str] | None) -> list[str]:
        outputs = self._engine.abort(request_ids)
        chosen = [p for p in self._parked if request_ids is None or p[0] in request_ids]
        self._parked = [p for p in self._parked if p not in chosen]
        for request_id, _, params in chosen:
            empty: list[float] | None = [] if params.logprobs else None
            outputs.append(RequestOutput(request_id=request_id, token_ids=[], log_probs=empty, finish_reason="abort"))
        self._deliver(outputs)
        return [o.request_id for o in outputs]

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            self._counts["finished_requests"] += 1
            self._counts["generated_tokens"] += len(output.token_ids)
            waiter = self._waiters.pop(output.request_id)
            if waiter.set_running_or_notify_cancel():
                waiter.set_result(output)

    def _fail_all(self, error: Exception) -> None:
        waiters, self._waiters = self._waiters, {}
        for waiter in waiters.values():
            if waiter.set_running_or_notify_cancel():
                waiter.set_exception(error)
        self._parked.clear()
