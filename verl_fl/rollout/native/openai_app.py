"""An OpenAI-shaped HTTP face of the native engine: completions and chat completions, plain or streamed.

Kept simple: a streamed answer arrives as one chunk per choice when that choice is finished.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from verl_fl.rollout.native.async_engine import AsyncEngine
from verl_fl.rollout.native.request import RequestOutput
from verl_fl.rollout.native.sampling import SamplingParams

_DEFAULT_MAX_TOKENS = 256
_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop", "stop_token_ids"),
    *("ignore_eos", "min_tokens", "seed"),
)
# Accepted and without effect: they only name the caller, or ask for what is the default here anyway.
_NO_EFFECT = ("user", "model", "stream_options", "metadata", "store")
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0, None),
    "presence_penalty": (0, None),
    "best_of": (1, None),
    "echo": (False, None),
    "suffix": (None,),
    "logit_bias": (None, {}),
    "top_logprobs": (0, 1, None),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
}


def make_app(async_engine: AsyncEngine, tokenizer: Any, model_name: str) -> web.Application:
    """The aiohttp application; the caller runs it and closes the engine."""
    server = _Server(async_engine, tokenizer, model_name)
    app = web.Application(middlewares=[_errors])
    app.router.add_get("/health", server.health)
    app.router.add_get("/v1/models", server.models)
    app.router.add_post("/v1/completions", server.completions)
    app.router.add_post("/v1/chat/completions", server.chat)
    return app


@web.middleware
async def _errors(request: web.Request, handler: Any) -> web.StreamResponse:
    """Errors as OpenAI clients expect them: 400 for a bad request, 503 where the engine cannot generate."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        return _error(error.status, f"{request.method} {request.path}: {error.reason}", "invalid_request_error")
    except (ValueError, TypeError, KeyError) as error:
        return _error(400, str(error), "invalid_request_error")
    except RuntimeError as error:
        return _error(503, str(error), "server_error")


def _error(status: int, message: str, kind: str) -> web.Response:
    body = {"error": {"message": message, "type": kind, "param": None, "code": None}}
    return web.json_response(body, status=status)


class _Server:
    def __init__(self, engine: AsyncEngine, tokenizer: Any, model_name: str) -> None:
        self._engine, self._tokenizer, self._model = engine, tokenizer, model_name

    async def health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok", **self._engine.stats()})

    async def models(self, _: web.Request) -> web.Response:
        card = {"id": self._model, "object": "model", "created": 0, "owned_by": "verl-fl"}
        return web.json_response({"object": "list", "data": [card]})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await _json(request)
        return await self._answer(request, body, self._prompts(body), chat=False)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await _json(request)
        messages = body.get("messages")
        if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
            raise ValueError(f"messages is {messages!r}: legal is a list of objects with role and content.")
        try:
            ids = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except Exception as error:  # the template is the model's own program and may raise anything
            raise ValueError(f"messages do not fit the model's chat template: {error}") from error
        return await self._answer(request, body, [list(ids)], chat=True)

    def _prompts(self, body: dict[str, Any]) -> list[list[int]]:
        """Token ids of each prompt: a text, a list of texts, token ids, or a list of those."""
        prompt = body.get("prompt")
        if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and isinstance(prompt[0], int)):
            prompt = [prompt]
        if not isinstance(prompt, list) or not prompt:
            raise ValueError(f"prompt is {prompt!r}: legal are a text, token ids, or a list of either.")
        prompts = [self._tokenizer.encode(p) if isinstance(p, str) else p for p in prompt]
        if not all(isinstance(p, list) and all(type(t) is int for t in p) for p in prompts):
            raise ValueError("prompt mixes texts and token ids: legal are a text, token ids, or a list of either.")
        return prompts

    async def _answer(
        self, request: web.Request, body: dict[str, Any], prompts: list[list[int]], *, chat: bool
    ) -> web.StreamResponse:
        params, n = _parameters(body, chat=chat)
        name = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        head = {"id": name, "created": int(time.time()), "model": self._model}
        jobs = [(p, _nth(params, i)) for p, i in itertools.product(prompts, range(n))]
        tasks = [asyncio.ensure_future(self._engine.generate(p, q, f"{name}-{i}")) for i, (p, q) in enumerate(jobs)]
        try:
            if body.get("stream"):
                return await self._stream(request, head, tasks, chat=chat)
            outputs = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()  # no effect on finished ones; ends the rest when the client went away
        choices = [self._choice(i, output, chat=chat) for i, output in enumerate(outputs)]
        prompt_tokens, answer_tokens = sum(map(len, prompts)), sum(len(o.token_ids) for o in outputs)
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": answer_tokens,
            "total_tokens": prompt_tokens + answer_tokens,
        }
        kind = "chat.completion" if chat else "text_completion"
        return web.json_response({**head, "object": kind, "choices": choices, "usage": usage})

    async def _stream(
        self, request: web.Request, head: dict[str, Any], tasks: Sequence[asyncio.Future], *, chat: bool
    ) -> web.StreamResponse:
        # The first answer decides between an error status and a stream: headers cannot be taken back.
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        kind = "chat.completion.chunk" if chat else "text_completion"
        for i, task in enumerate(tasks):
            choice = self._choice(i, await task, chat=chat)
            if chat:
                choice["delta"] = choice.pop("message")
            chunk = {**head, "object": kind, "choices": [choice]}
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _choice(self, index: int, output: RequestOutput, *, chat: bool) -> dict[str, Any]:
        text = self._tokenizer.decode(output.token_ids, skip_special_tokens=True)
        if isinstance(output.stop_reason, str):  # OpenAI leaves the stop string out of the text
            text = text.partition(output.stop_reason)[0]
        tokens = [self._tokenizer.decode([t]) for t in output.token_ids]
        logprobs: dict[str, Any] | None = None
        if output.log_probs is not None and chat:
            entries = zip(tokens, output.log_probs, strict=True)
            logprobs = {"content": [{"token": t, "logprob": p, "top_logprobs": []} for t, p in entries]}
        elif output.log_probs is not None:
            logprobs = {"tokens": tokens, "token_logprobs": output.log_probs, "top_logprobs": None}
        content = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": output.finish_reason}


async def _json(request: web.Request) -> dict[str, Any]:
    try:
        body = await request.json()
    except json.JSONDecodeError as error:
        raise ValueError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise ValueError(f"the body is {type(body).__name__}: legal is a JSON object.")
    return body


def _parameters(body: dict[str, Any], *, chat: bool) -> tuple[SamplingParams, int]:
    """Sampling parameters and the number of choices a prompt. ValueError for what this server does not do."""
    own = ("prompt", "messages", "n", "stream", "logprobs", "max_tokens", "max_completion_tokens")
    for key, value in body.items():
        if key in _NEUTRAL and value in _NEUTRAL[key]:
            continue
        if key not in (*own, *_SAMPLING, *_NO_EFFECT):
            legal = ", ".join(sorted({*own, *_SAMPLING, *_NO_EFFECT}))
            raise ValueError(f"{key}={value!r} is not supported by this server; legal are {legal}.")
    n = body.get("n") or 1
    if type(n) is not int or n < 1:
        raise ValueError(f"n={n!r}: legal is a positive integer.")
    asked = {key: body[key] for key in _SAMPLING if key in body}
    asked["max_tokens"] = body.get("max_completion_tokens") or body.get("max_tokens")
    # Chat says true or false; completions a number of alternatives, where 0 still asks for the token's own.
    asked["logprobs"] = body.get("logprobs") or (None if chat else body.get("logprobs"))
    return SamplingParams.from_dict(asked, default_max_tokens=_DEFAULT_MAX_TOKENS), n


def _nth(params: SamplingParams, i: int) -> SamplingParams:
    """The params of choice i: a seed makes the answer repeatable, not its choices equal."""
    return params if params.seed is None else dataclasses.replace(params, seed=params.seed + i)
