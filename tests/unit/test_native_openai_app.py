"""The OpenAI-shaped server over a tiny model and a byte-level tokenizer."""

import json

import pytest
from aiohttp.test_utils import TestClient, TestServer
from test_native_models import engine_for, prompts_of, reference, tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from verl_fl.rollout.native.async_engine import AsyncEngine
from verl_fl.rollout.native.openai_app import make_app

TEMPLATE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}assistant: "


def tokenizer():
    """One token a byte, after three special ones."""
    specials = ["<pad>", "<eos>", "<bos>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {t: i for i, t in enumerate([*specials, *letters])}
    bpe = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    bpe.add_special_tokens(specials)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", chat_template=TEMPLATE
    )


@pytest.fixture
async def client():
    tok = tokenizer()
    engine = AsyncEngine(engine_for(tiny_model(), tokenizer=tok))
    async with TestClient(TestServer(make_app(engine, tok, "tiny"))) as client:
        yield client
    engine.close()


async def post(client, path, **body):
    response = await client.post(path, json=body)
    return response.status, await response.json()


async def test_health_and_models(client):
    assert (await (await client.get("/health")).json())["status"] == "ok"
    assert (await (await client.get("/v1/models")).json())["data"][0]["id"] == "tiny"


async def test_completion_of_token_ids_equals_generate(client):
    prompt = prompts_of(7)[0]
    status, answer = await post(
        client, "/v1/completions", model="tiny", prompt=prompt, max_tokens=6, temperature=0, ignore_eos=True, logprobs=0
    )
    assert status == 200, answer
    choice = answer["choices"][0]
    assert choice["text"] == tokenizer().decode(reference(tiny_model(), prompt, 6), skip_special_tokens=True)
    assert choice["finish_reason"] == "length" and len(choice["logprobs"]["token_logprobs"]) == 6
    assert answer["usage"] == {"prompt_tokens": 7, "completion_tokens": 6, "total_tokens": 13}


async def test_several_prompts_and_samples(client):
    body = dict(prompt=["one", "two"], n=3, max_tokens=4, seed=5, ignore_eos=True, min_tokens=4)
    status, answer = await post(client, "/v1/completions", **body)
    assert status == 200, answer
    assert [c["index"] for c in answer["choices"]] == list(range(6))
    assert len({c["text"] for c in answer["choices"]}) > 3
    assert (await post(client, "/v1/completions", **body))[1]["choices"] == answer["choices"]


async def test_stop_string_is_left_out_of_the_text(client):
    body = dict(prompt="hello", max_tokens=20, temperature=0, ignore_eos=True)
    free = (await post(client, "/v1/completions", **body))[1]["choices"][0]["text"]
    stop = next(c for c in free[3:] if c.isascii() and c not in free[:3])
    _, answer = await post(client, "/v1/completions", **body, stop=[stop])
    assert answer["choices"][0]["text"] == free.partition(stop)[0]
    assert answer["choices"][0]["finish_reason"] == "stop"


async def test_chat_plain_and_streamed_agree(client):
    messages = [{"role": "user", "content": "hi"}]
    body = dict(messages=messages, max_tokens=5, temperature=0, ignore_eos=True, logprobs=True)
    status, answer = await post(client, "/v1/chat/completions", **body)
    assert status == 200, answer
    message = answer["choices"][0]["message"]
    assert message["role"] == "assistant" and len(answer["choices"][0]["logprobs"]["content"]) == 5
    assert answer["usage"]["prompt_tokens"] == len("user: hi\nassistant: ")
    response = await client.post("/v1/chat/completions", json={**body, "stream": True})
    events = [line[6:] for line in (await response.text()).split("\n\n") if line]
    assert response.headers["Content-Type"].startswith("text/event-stream") and events[-1] == "[DONE]"
    assert json.loads(events[0])["choices"][0]["delta"] == message


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/completions", {"prompt": "x", "temperature": -1}, "temperature=-1"),
        ("/v1/completions", {"prompt": "x", "frequency_penalty": 0.5}, "frequency_penalty"),
        ("/v1/completions", {"prompt": [1, "x"]}, "mixes"),
        ("/v1/completions", {}, "prompt is None"),
        ("/v1/completions", {"prompt": "x", "n": 0.5}, "n=0.5"),
        ("/v1/completions", {"prompt": [9] * 500}, "prompt of 500 tokens"),
        ("/v1/completions", {"prompt": "x", "temperature": "warm"}, "warm|not supported"),
        ("/v1/chat/completions", {"messages": "hi"}, "messages is 'hi'"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, "chat template"),
    ],
)
async def test_bad_request_is_a_400_in_openai_shape(client, path, body, message):
    status, answer = await post(client, path, **body)
    assert status == 400, answer
    assert answer["error"]["type"] == "invalid_request_error"
    import re

    assert re.search(message, answer["error"]["message"]), answer


async def test_body_that_is_not_json_and_unknown_path(client):
    response = await client.post("/v1/completions", data="{")
    assert response.status == 400 and "not JSON" in (await response.json())["error"]["message"]
    response = await client.get("/v1/nothing")
    assert response.status == 404 and "error" in await response.json()
