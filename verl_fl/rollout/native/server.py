"""One replica of the built-in rollout: a Ray actor that answers verl's server calls with an :class:`AsyncEngine`."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import os
import queue
import socket
from collections.abc import Iterator
from typing import Any

import torch
from aiohttp import web

from verl_fl import _verl
from verl_fl._errors import explain
from verl_fl.platform.cpu import keep_freed_memory
from verl_fl.rollout.native.async_engine import AsyncEngine
from verl_fl.rollout.native.engine import NativeEngine
from verl_fl.rollout.native.openai_app import make_app
from verl_fl.rollout.native.request import RequestOutput
from verl_fl.rollout.native.sampling import SamplingParams

logger = logging.getLogger("verl_fl.rollout")

Bucket = list[tuple[str, torch.Tensor]]
_UPDATE_LIMIT_S = 600.0
"""A weight update whose next bucket does not come within this time has lost its sender."""


class NativeServer:
    """Token in, token out, over Ray; and the same engine under an OpenAI-compatible address.

    Args:
        config: verl's RolloutConfig of this replica.
        model_config: verl's HFModelConfig.
        replica_rank: this replica's number in the job.
        num_threads: torch threads for generation.
    """

    def __init__(self, config: Any, model_config: Any, replica_rank: int, num_threads: int) -> None:
        self.config = config
        self.options = dict(config.engine_kwargs.get("native", None) or {})
        self.replica_rank = replica_rank
        self.global_steps: int | None = None
        self._updates: queue.Queue[Bucket | None | Exception] | None = None
        self._check_options(model_config)
        self._update: asyncio.Task | None = None
        keep_freed_memory()
        torch.set_num_threads(num_threads)
        self.tokenizer = model_config.tokenizer
        self.max_model_len = _max_model_len(config, model_config.hf_config)
        engine = NativeEngine(
            _load_model(config, model_config),
            self.tokenizer,
            eos_token_ids=_eos_token_ids(model_config),
            max_model_len=self.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_prefill_tokens=config.max_num_batched_tokens,
            kv_cache_bytes=self.options.get("kv_cache_bytes"),
            device=_verl.current_platform().current_device(),
        )
        self.engine = AsyncEngine(engine, num_threads=num_threads)
        self.model_name = model_config.path
        self._runner: web.AppRunner | None = None
        self._address: tuple[str, int] | None = None

    def _check_options(self, model_config: Any) -> None:
        lora = getattr(model_config, "lora_rank", 0) > 0 and not (getattr(model_config, "lora", None) or {}).get(
            "merge"
        )
        if self.options.get("sleep_level", 1) == 2 and lora:
            raise ValueError(
                explain(
                    "sleep level 2 frees base weights that an adapter's sync never brings back",
                    asked="rollout.engine_kwargs.native.sleep_level=2 with model.lora_rank > 0",
                    legal="sleep_level=1, or model.lora.merge=true",
                    fix="drop sleep_level",
                )
            )
        if self.config.full_determinism and getattr(self.config, "n", 1) > 1:
            logger.warning(
                "rollout: full_determinism gives the %d samples of a prompt one seed each replica: they are "
                "equal, and their advantages zero",
                self.config.n,
            )

    async def launch_server(self) -> tuple[str, int]:
        """Listen on this node's own address and return ``(host, port)``; idempotent.

        Raises:
            RuntimeError: the port that was asked for is taken.
        """
        if self._address is None:
            import ray

            host = ray.util.get_node_ip_address().strip("[]")
            listener = _listen(host, self.options.get("port"), self.replica_rank)
            self._runner = web.AppRunner(make_app(self.engine, self.tokenizer, self.model_name), access_log=None)
            await self._runner.setup()
            await web.SockSite(self._runner, listener).start()
            self._address = (host, listener.getsockname()[1])
        return self._address

    # --- generation ---

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: list | None = None,
        video_data: list | None = None,
        **extra: Any,
    ) -> Any:
        """Generate for one prompt; returns verl's TokenOutput, whose ``global_steps`` is the weights' version.

        Raises:
            ValueError: multi-modal input, or a prompt that leaves no room for a token.
        """
        if image_data or video_data or extra.get("audio_data"):
            raise ValueError(
                explain(
                    "rollout 'native' generates from text only",
                    asked=f"request {request_id!r} with images, video or audio",
                    legal="token ids",
                    fix="use rollout.name=vllm for such data",
                )
            )
        params = self._params(len(prompt_ids), dict(sampling_params))
        return self._token_output(await self.engine.generate(list(prompt_ids), params, request_id))

    def _params(self, prompt_length: int, sampling: dict[str, Any]) -> SamplingParams:
        room = self.max_model_len - prompt_length
        if room < 1:
            raise ValueError(
                explain(
                    "the prompt leaves no room for an answer",
                    asked=f"a prompt of {prompt_length} tokens",
                    legal=f"at most {self.max_model_len - 1} (max_model_len {self.max_model_len} less one)",
                    fix="raise actor_rollout_ref.rollout.max_model_len, or lower data.max_prompt_length",
                )
            )
        budget = self.config.prompt_length + self.config.response_length - prompt_length
        default = max(1, min(self.config.response_length, budget, room))
        sampling.setdefault("ignore_eos", self.config.ignore_eos)
        sampling.setdefault("repetition_penalty", self.config.repetition_penalty)
        if self.config.full_determinism:
            sampling.setdefault("seed", self.config.seed + self.replica_rank)
        for key in ("max_tokens", "max_new_tokens"):
            if sampling.get(key) is not None:
                sampling[key] = max(1, min(int(sampling[key]), room))
        return SamplingParams.from_dict(sampling, default_max_tokens=default)

    def _token_output(self, output: RequestOutput) -> Any:
        from verl.workers.rollout.replica import TokenOutput

        stop_reason = "aborted" if output.finish_reason == "abort" else "completed"
        versions = {
            "global_steps": self.global_steps if output.weight_version_max is None else output.weight_version_max,
            "min_global_steps": self.global_steps if output.weight_version_min is None else output.weight_version_min,
        }
        versions["max_global_steps"] = versions["global_steps"]
        return TokenOutput(
            token_ids=output.token_ids,
            log_probs=output.log_probs,
            stop_reason=stop_reason,
            num_preempted=output.num_preempted,
            extra_fields={**versions, "num_cached_tokens": output.num_cached_tokens},
        )

    async def abort_all_requests(self, reject_request: bool = False, **_: Any) -> dict[str, Any]:
        """End every request with what it has so far and hold (or, rejecting, turn away) new ones until resumed."""
        aborted = await self.engine.pause(reject=reject_request)
        return {"aborted_count": len(aborted), "request_ids": aborted}

    async def abort_request(self, request_id: str, **_: Any) -> dict[str, Any]:
        """End one request with what it has so far."""
        aborted = await self.engine.abort([request_id])
        return {"aborted": bool(aborted), "request_id": request_id}

    async def resume_generation(self) -> None:
        """Answer requests again after :meth:`abort_all_requests`."""
        await self.engine.resume()

    async def wait_for_requests_to_drain(self) -> None:
        """Return when nothing is running or waiting."""
        while self.engine.stats()["running"] + self.engine.stats()["waiting"]:
            await asyncio.sleep(0.01)

    # --- memory ---

    async def sleep(self) -> None:
        """Free the KV cache, and at ``engine_kwargs.native.sleep_level=2`` the weights too."""
        await self.engine.sleep(int(self.options.get("sleep_level", 1)))

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Take the memory back that :meth:`sleep` gave away."""
        await self.engine.wake()

    async def clear_kv_cache(self) -> None:
        """Forget every cached prefix."""
        await self.engine.reset_prefix_cache()

    async def release_kv_cache(self) -> None:
        """Free the KV cache for the time of a weight sync."""
        await self.engine.sleep(1)

    async def resume_kv_cache(self) -> None:
        """Counterpart to :meth:`release_kv_cache`."""
        await self.engine.wake()

    # --- weights, in buckets: the engine's thread draws them while the sender makes the next one ---

    async def start_weight_update(self, version: int | None, lora_config: dict | None = None) -> None:
        """Begin an update; buckets follow through :meth:`put_weights`, then :meth:`finish_weight_update`."""
        if self._update is not None:
            await self.fail_weight_update("the sender started another update before it had ended this one")
        self._updates = queue.Queue(maxsize=2)
        stream = _drain(self._updates)
        if lora_config is None:
            coroutine = self.engine.update_weights(stream, version=version)
        else:
            coroutine = self.engine.update_lora(stream, lora_config, version=version)
        self._update = asyncio.ensure_future(coroutine)
        self._update_version = version

    async def put_weights(self, bucket: list[tuple[str, torch.dtype, torch.Size, Any]]) -> None:
        """Hand one bucket over: ``(name, dtype, shape, raw bytes)`` each.

        Raises:
            Whatever ended the update, so that the sender stops at once.
        """
        if self._update is None or self._updates is None:
            raise RuntimeError("weights came without start_weight_update; start the update again")
        await self._put([(name, _from_bytes(raw, dtype, shape)) for name, dtype, shape, raw in bucket])

    async def _put(self, item: Bucket | None | Exception) -> None:
        """Hand an item to the engine's thread once it has room; raises what ended the update instead of waiting on."""
        assert self._update is not None and self._updates is not None
        while True:
            if self._update.done():
                await self._update
                return
            try:
                self._updates.put_nowait(item)
                return
            except queue.Full:
                await asyncio.sleep(0.002)

    async def finish_weight_update(self) -> None:
        """Return when the new weights are in use; raises what went wrong otherwise."""
        assert self._update is not None
        try:
            await self._put(None)
            await self._update
        finally:
            self._update = self._updates = None
        if self._update_version is not None:
            self.global_steps = self._update_version

    async def fail_weight_update(self, reason: str) -> None:
        """End an update whose rest will not come; the engine answers again, and says why its weights are no whole."""
        if self._update is None:
            return
        with contextlib.suppress(Exception):
            await self._put(RuntimeError(reason))
        await asyncio.gather(self._update, return_exceptions=True)
        self._update = self._updates = None

    async def set_global_steps(self, global_steps: int) -> None:
        """Set the version that outputs carry."""
        self.global_steps = global_steps

    # --- for verl's profiler: the engine has nothing of its own to record ---

    async def start_profile(self, **_: Any) -> None:
        """Nothing to start: the server's process is not profiled."""

    async def stop_profile(self) -> None:
        """Nothing to stop."""

    async def stats(self) -> dict[str, Any]:
        """Counters of the engine."""
        return self.engine.stats() | {"global_steps": self.global_steps, "pid": os.getpid()}


def _drain(buckets: queue.Queue[Bucket | None | Exception]) -> Iterator[tuple[str, torch.Tensor]]:
    while True:
        try:
            bucket = buckets.get(timeout=_UPDATE_LIMIT_S)
        except queue.Empty:
            raise TimeoutError(f"no further weights within {_UPDATE_LIMIT_S:g} s: the trainer's end is gone") from None
        if bucket is None:
            return
        if isinstance(bucket, Exception):
            raise bucket
        yield from bucket


def _from_bytes(raw: Any, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    if raw.size == 0:
        return torch.empty(shape, dtype=dtype)
    import warnings

    with warnings.catch_warnings():  # Ray hands out read-only memory; the engine only copies from it
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(raw).view(dtype).view(shape)


def _load_model(config: Any, model_config: Any) -> Any:
    from transformers import AutoModelForCausalLM
    from verl.utils.torch_dtypes import PrecisionType

    dtype = PrecisionType.to_dtype(config.dtype)
    return AutoModelForCausalLM.from_pretrained(
        model_config.local_path,
        config=copy.deepcopy(model_config.hf_config),  # with the user's override_config, as the trainer has it
        dtype=dtype,
        trust_remote_code=model_config.trust_remote_code,
    ).eval()


def _eos_token_ids(model_config: Any) -> list[int]:
    ids: set[int] = set()
    for source in (model_config.generation_config, model_config.tokenizer, model_config.hf_config):
        value = getattr(source, "eos_token_id", None)
        ids.update([value] if isinstance(value, int) else value or [])
    return sorted(ids)


def _max_model_len(config: Any, hf_config: Any) -> int:
    text_config = getattr(hf_config, "text_config", hf_config)
    limit = getattr(text_config, "max_position_embeddings", None)
    asked = config.max_model_len or config.prompt_length + config.response_length
    if limit is not None and asked > limit:
        raise ValueError(
            explain(
                "the model can't see as far as the rollout asks",
                asked=f"{asked} tokens (rollout.max_model_len, or prompt_length + response_length)",
                legal=f"at most {limit} (the model's max_position_embeddings)",
                fix="lower data.max_prompt_length or data.max_response_length",
            )
        )
    return asked


def _listen(host: str, port: int | None, replica_rank: int) -> socket.socket:
    """A listening socket on ``host``: a free port, or the asked one plus the replica's number, held until used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    wanted = 0 if port is None else int(port) + replica_rank
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, wanted))
    except OSError as error:
        listener.close()
        raise RuntimeError(
            explain(
                f"replica {replica_rank} can't listen on {host}:{wanted}: {error.strerror}",
                asked=f"actor_rollout_ref.rollout.engine_kwargs.native.port={port} (+{replica_rank} for this replica)",
                legal="a free port, or none: then any free one is taken",
                fix=f"end what listens there (`ss -ltnp sport = :{wanted}`), or choose another port",
            )
        ) from error
    return listener
