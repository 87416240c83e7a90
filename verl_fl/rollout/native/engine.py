"""The native rollout engine: continuous batching over any Hugging Face causal LM. Synchronous; one thread at a time.

`step` is the whole loop: admit and prefill waiting requests if there is room, else decode one token for all running.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from verl_fl.platform.cpu import CPUDeviceModule
from verl_fl.rollout.native._fast_decode import fast_decoder
from verl_fl.rollout.native._linear import PackedLinears
from verl_fl.rollout.native._stop import StopStrings
from verl_fl.rollout.native.request import FinishReason, Request, RequestOutput
from verl_fl.rollout.native.runner import ModelRunner
from verl_fl.rollout.native.sampling import BatchSampler, SamplingParams, penalise
from verl_fl.rollout.native.weights import ServedWeights

logger = logging.getLogger("verl_fl.rollout")

_DEFAULT_KV_FRACTION = 0.3
# Room a newcomer must find beside its prompt, so that it is not preempted right after its prefill.
_HEADROOM_TOKENS = 16


class NativeEngine:
    """Serves a model token-in, token-out. Takes the model over (attention, grad mode, weights)."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        eos_token_ids: Sequence[int],
        max_model_len: int,
        max_num_seqs: int = 256,
        max_prefill_tokens: int = 8192,
        kv_cache_bytes: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """model is a transformers causal LM; tokenizer is needed for stop strings only.

        kv_cache_bytes: None takes 30% of the free memory.

        Raises ValueError where the model cannot be served.
        """
        if device is not None:
            model.to(device)
        budget = kv_cache_bytes or int(_free_bytes(next(model.parameters()).device) * _DEFAULT_KV_FRACTION)
        self.runner = ModelRunner(model, budget_bytes=budget)
        self.weights = ServedWeights(model)
        self._packed = PackedLinears(model)
        self._fast = fast_decoder(model, self.runner.cache, self._packed)
        self.weight_version: int | None = None
        # A request alone must fit the cache to its end, or it would be preempted for ever.
        self.max_model_len = min(max_model_len, self.runner.cache.budget_tokens)
        if self.max_model_len < max_model_len:
            logger.warning(
                "rollout: answers end at %d tokens instead of max_model_len %d: the KV cache holds no more (%d bytes)",
                *(self.max_model_len, max_model_len, budget),
            )
        self.max_num_seqs, self.max_prefill_tokens = max_num_seqs, max_prefill_tokens
        self._tokenizer = tokenizer
        self._eos = frozenset(eos_token_ids)
        self._vocab = model.get_input_embeddings().weight.shape[0]
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []  # in slot order
        self._arrivals = 0
        self._asleep = False
        self._batch: _Batch | None = None

    # -- requests -----------------------------------------------------------------------------------------------------

    def add_request(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        """Queue a request. ValueError: it can never run here; RuntimeError: the engine sleeps or lacks weights."""
        self._check_ready()
        prompt = [int(t) for t in prompt_ids]
        self._check_prompt(request_id, prompt, params)
        self._arrivals += 1
        request = Request(request_id=request_id, prompt_ids=prompt, params=params, arrival=self._arrivals)
        request.rng.seed(params.seed)
        if params.stop:
            request.stop_strings = StopStrings(self._tokenizer, params.stop)
        self._waiting.append(request)

    def abort(self, request_ids: Iterable[str] | None = None) -> list[RequestOutput]:
        """End the named requests (None: all) where they are; unknown ids are passed over."""
        wanted = None if request_ids is None else set(request_ids)
        chosen = [r for r in (*self._running, *self._waiting) if wanted is None or r.request_id in wanted]
        gone = set(map(id, chosen))
        self._waiting = deque(r for r in self._waiting if id(r) not in gone)
        self._remove(gone)
        return [r.output("abort") for r in chosen]

    def has_work(self) -> bool:
        """Whether `step` has something to do; not while asleep: requests then wait for `wake`."""
        return bool(self._waiting or self._running) and not self._asleep

    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        """One prefill or one decode step; the requests it finished."""
        self._check_ready()
        admitted = self._admit()
        if admitted:
            return self._prefill(admitted)
        return self._decode() if self._running else []

    def num_requests(self) -> tuple[int, int]:
        """Running and waiting."""
        return len(self._running), len(self._waiting)

    # -- weights and memory -------------------------------------------------------------------------------------------

    def update_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], *, version: int | None = None) -> None:
        """Replace all weights (HF state_dict names). Running requests continue on the new ones, tokens kept.

        Raises what `ServedWeights.load` raises; generation is then refused until a full update succeeds.
        """
        self._preempt_all()
        self.weights.load(named_tensors)
        self._weights_changed(version)

    def update_lora(
        self,
        named_tensors: Iterable[tuple[str, torch.Tensor]],
        peft_config: Mapping[str, Any],
        *,
        version: int | None = None,
    ) -> None:
        """Merge a LoRA adapter into the served weights, in place of the one before. See `ServedWeights.load_lora`."""
        if self.weights.incomplete:
            self._refuse_weights()
        self._preempt_all()
        self.weights.load_lora(named_tensors, peft_config)
        self._weights_changed(version)

    def sleep(self, level: int = 1) -> None:
        """Free the KV cache (1), and the weights (2; a full update must follow). Running requests are preempted."""
        if level not in (1, 2):
            raise ValueError(f"sleep level {level!r}: legal are 1 (free the KV cache) and 2 (and the weights).")
        self._preempt_all()
        self.runner.cache.free()
        if level == 2:
            self.weights.free()
            self._packed.free()
        self._asleep = True

    def wake(self) -> None:
        """Allow generation again; memory is taken when requests need it."""
        self._asleep = False

    def reset_prefix_cache(self) -> None:
        """Nothing outlives a request here: keys and values are shared only with a running request."""

    def _weights_changed(self, version: int | None) -> None:
        # Freed, not kept: stale positions may hold anything, NaN included, and masked ones still enter products.
        self.runner.cache.free()
        self._packed.refresh()
        self.weight_version = version

    # -- scheduling ---------------------------------------------------------------------------------------------------

    def _admit(self) -> list[Request]:
        """Take waiting requests, oldest first, that fit the slots, the KV budget and one prefill."""
        admitted: list[Request] = []
        longest_stored = max((r.num_stored for r in self._running), default=0)
        longest_prefill = 0
        distinct: set[tuple[int, ...]] = set()
        while self._waiting and len(self._running) + len(admitted) < self.max_num_seqs:
            request = self._waiting[0]
            slots = len(self._running) + len(admitted) + 1
            longest_prefill = max(longest_prefill, len(request))
            alone = slots == 1
            tokens = max(longest_stored, longest_prefill) + (1 if alone else _HEADROOM_TOKENS)
            if not self.runner.cache.fits(slots, tokens):
                break
            distinct.add(tuple(request.all_ids()))
            if admitted and longest_prefill * len(distinct) > self.max_prefill_tokens:
                break
            admitted.append(self._waiting.popleft())
        return admitted

    def _prefill(self, admitted: list[Request]) -> list[RequestOutput]:
        """Compute each distinct prompt once, copy it to its siblings' slots, sample the first tokens."""
        first = len(self._running)
        running = {tuple(r.prompt_ids): slot for slot, r in enumerate(self._running)}
        distinct: dict[tuple[int, ...], list[Request]] = {}
        joining: list[tuple[int, Request]] = []
        for request in admitted:
            key = tuple(request.all_ids())
            if key in running and len(key) > 1:
                joining.append((running[key], request))
            else:
                distinct.setdefault(key, []).append(request)
        leaders = sorted(distinct, key=len)
        siblings = [(first + i, r) for i, key in enumerate(leaders) for r in distinct[key][1:]]
        self._reserve(first + len(admitted), 1 + max(len(r) for r in admitted))
        logits = self.runner.prefill(leaders, first) if leaders else None
        copies: dict[tuple[int, int], list[int]] = {}
        sampled = [distinct[key][0] for key in leaders] + [r for _, r in siblings]
        self._running += sampled + [r for _, r in joining]
        slot = first + len(leaders)
        for source, request in siblings:
            request.num_cached_tokens = len(request.prompt_ids)
            copies.setdefault((source, len(request)), []).append(slot)
            slot += 1
        for source, request in joining:
            # The sibling already decodes: this one feeds its last prompt token in the next decode step.
            request.num_cached_tokens = request.num_stored = len(request) - 1
            copies.setdefault((source, request.num_stored), []).append(slot)
            slot += 1
        for (source, tokens), targets in copies.items():
            self.runner.cache.copy_slot(source, targets, tokens)
        self._batch = None
        if logits is None:
            return []
        for request in sampled:
            request.num_stored = len(request)
        rows = [*range(len(leaders)), *(source - first for source, _ in siblings)]
        if siblings:
            logits = logits[torch.tensor(rows, device=logits.device)]
        return self._sample(sampled, logits, BatchSampler([r.params for r in sampled], logits.device))[0]

    def _decode(self) -> list[RequestOutput]:
        """Feed every running request its next token and sample one more."""
        self._make_room()
        batch = self._batch
        if batch is None:
            batch = self._batch = _Batch(self._running, self.runner.device)
        logits = (self._fast or self.runner.decode)(batch.tokens, batch.positions, batch.longest)
        for request in self._running:
            request.num_stored += 1
        finished, tokens = self._sample(self._running, logits, batch.sampler)
        if self._batch is batch:
            batch.advance(tokens)
        return finished

    def _make_room(self) -> None:
        """Reserve one more position a row; where the budget does not allow it, preempt the newest requests."""
        needed = max(r.num_stored for r in self._running) + 1
        while not self.runner.cache.fits(len(self._running), needed):
            self._preempt({id(max(self._running, key=lambda r: r.arrival))})
            needed = max(r.num_stored for r in self._running) + 1
        self._reserve(len(self._running), needed)

    def _reserve(self, slots: int, tokens: int) -> None:
        used = max((r.num_stored for r in self._running), default=0)
        tokens = max(tokens, used)
        self.runner.cache.reserve(slots, tokens, used_slots=len(self._running), used_tokens=used)

    def _preempt_all(self) -> None:
        self._preempt(set(map(id, self._running)))

    def _preempt(self, chosen: set[int]) -> None:
        victims = [r for r in self._running if id(r) in chosen]
        for request in sorted(victims, key=lambda r: r.arrival, reverse=True):
            request.num_preempted += 1
            request.num_stored = 0
            self._waiting.appendleft(request)
        self._remove(chosen)

    @torch.inference_mode()
    def _remove(self, chosen: set[int]) -> None:
        """Take requests out of their slots; the last ones move into the holes."""
        for slot in reversed([i for i, r in enumerate(self._running) if id(r) in chosen]):
            last = self._running.pop()
            if slot < len(self._running):
                self.runner.cache.copy_slot(len(self._running), [slot], last.num_stored)
                self._running[slot] = last
            self._batch = None

    # -- sampling -----------------------------------------------------------------------------------------------------

    def _sample(
        self, requests: list[Request], logits: torch.Tensor, sampler: BatchSampler
    ) -> tuple[list[RequestOutput], torch.Tensor]:
        """Append one token to each request; the outputs of those that end with it, and the tokens [N]."""
        requests = list(requests)
        tokens, log_probs = sampler(logits, [r.rng.random() for r in requests], self._adjusted(requests, logits))
        values: list[float] = log_probs.tolist() if log_probs is not None else []
        finished, gone = [], set()
        for i, (request, token) in enumerate(zip(requests, tokens.tolist(), strict=True)):
            request.token_ids.append(token)
            if request.params.logprobs:
                request.log_probs.append(values[i])
            if request.seen is not None:
                request.seen[token] = True
            if self.weight_version is not None and self.weight_version not in request.weight_versions:
                request.weight_versions.append(self.weight_version)
            if reason := self._finish(request, token):
                finished.append(request.output(*reason))
                gone.add(id(request))
        if gone:
            self._remove(gone)
        return finished, tokens

    def _finish(self, request: Request, token: int) -> tuple[FinishReason, int | str | None] | None:
        """Finish and stop reason, if the request ends with this token."""
        params, count = request.params, len(request.token_ids)
        hit = request.stop_strings.found(request.token_ids) if request.stop_strings else None
        if count >= params.min_tokens:
            if token in params.stop_token_ids or (token in self._eos and not params.ignore_eos):
                return "stop", token
            if hit is not None:
                return "stop", hit
        if count >= params.max_tokens or len(request) >= self.max_model_len:
            return "length", None
        return None

    def _adjusted(self, requests: list[Request], logits: torch.Tensor) -> torch.Tensor | None:
        """Logits after repetition penalties and min_tokens; None where no row asks for either."""
        penalised = [i for i, r in enumerate(requests) if r.params.repetition_penalty != 1]
        early = [i for i, r in enumerate(requests) if len(r.token_ids) + 1 < r.params.min_tokens]
        if not penalised and not early:
            return None
        adjusted = logits.float().clone()
        if penalised:
            seen = torch.stack([requests[i].seen_tokens(logits.shape[1], logits.device) for i in penalised])
            rows = torch.tensor(penalised, device=logits.device)
            penalty = torch.tensor([[requests[i].params.repetition_penalty] for i in penalised], device=logits.device)
            adjusted[rows] = penalise(adjusted[rows], seen, penalty)
        for i in early:
            banned = {*requests[i].params.stop_token_ids, *(() if requests[i].params.ignore_eos else self._eos)}
            adjusted[i, list(banned)] = -torch.inf
        return adjusted

    # -- checks -------------------------------------------------------------------------------------------------------

    def _check_ready(self) -> None:
        if self.weights.incomplete:
            self._refuse_weights()
        if self._asleep:
            raise RuntimeError("generation was asked for while the native engine sleeps. Call wake() first.")

    def _refuse_weights(self) -> None:
        raise RuntimeError(
            f"the native engine refuses to generate, its weights are incomplete: {self.weights.incomplete}. "
            "Send a full update_weights first."
        )

    def _check_prompt(self, request_id: str, prompt: list[int], params: SamplingParams) -> None:
        room = self.max_model_len - 1
        if not 1 <= len(prompt) <= room:
            cache = self.runner.cache
            raise ValueError(
                f"request {request_id!r} has a prompt of {len(prompt)} tokens; legal are 1 to {room} (max_model_len "
                f"{self.max_model_len}, KV cache {cache.budget_tokens} tokens of {cache.bytes_per_token} bytes, one "
                "token kept for the answer). Shorten the prompt or raise max_model_len or kv_cache_bytes."
            )
        if bad := [t for t in (*prompt, *params.stop_token_ids) if not 0 <= t < self._vocab]:
            raise ValueError(
                f"request {request_id!r} contains token id {bad[0]}; legal are 0 to {self._vocab - 1}. "
                "Use the tokenizer of the served model."
            )
        if params.stop and self._tokenizer is None:
            raise ValueError(
                f"request {request_id!r} asks for stop strings {params.stop!r}, and the engine has no tokenizer. "
                "Give it one, or use stop_token_ids."
            )


class _Batch:
    """What a decode step needs of the running requests, kept between steps while they stay the same."""

    def __init__(self, requests: list[Request], device: torch.device) -> None:
        feed = [(r.token_ids or r.prompt_ids)[-1] for r in requests]
        self.tokens = torch.tensor(feed, device=device)
        self.positions = torch.tensor([r.num_stored for r in requests], device=device)
        self.longest = max(r.num_stored for r in requests) + 1
        self.sampler = BatchSampler([r.params for r in requests], device)

    def advance(self, tokens: torch.Tensor) -> None:
        """The rows now feed tokens [N], one position on."""
        self.tokens, self.positions, self.longest = tokens, self.positions + 1, self.longest + 1


def _free_bytes(device: torch.device) -> int:
    """Memory that may be taken on the device, within a container's limit."""
    if device.type == "cpu":
        return CPUDeviceModule().mem_get_info()[0]
    return torch.get_device_module(device).mem_get_info(device)[0]
