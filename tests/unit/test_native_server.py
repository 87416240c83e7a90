"""The server around the engine, without Ray: what it refuses, how it is fed, and what its outputs carry."""

import asyncio
import socket
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_native_models import tiny_model

from verl_fl.rollout.native import server as module
from verl_fl.rollout.native.server import NativeServer


def config(**changes):
    values = dict(
        engine_kwargs={}, prompt_length=16, response_length=8, max_model_len=None, max_num_seqs=8, dtype="float32",
        max_num_batched_tokens=256, ignore_eos=True, repetition_penalty=1.0, full_determinism=False, seed=1,
    )  # fmt: skip
    return SimpleNamespace(**{**values, **changes})


@pytest.fixture
def make(monkeypatch):
    servers = []
    model = tiny_model("llama")
    hf_config = SimpleNamespace(max_position_embeddings=64, eos_token_id=1)
    model_config = SimpleNamespace(tokenizer=None, hf_config=hf_config, generation_config=None, path="tiny")
    monkeypatch.setattr(module, "_load_model", lambda *_: model)

    def build(**changes):
        servers.append(NativeServer(config(**changes), model_config, replica_rank=1, num_threads=1))
        return servers[-1]

    yield build
    for server in servers:
        server.engine.close()


def wire(state):
    return [(k, v.dtype, v.shape, v.contiguous().view(-1).view(torch.uint8).numpy()) for k, v in state.items()]


GREEDY = {"temperature": 0, "logprobs": True}


async def test_weights_come_in_buckets_and_outputs_carry_their_version(make):
    server, other = make(), tiny_model("llama", seed=9)
    before = await server.generate([5, 6, 7], GREEDY, "a")
    items = wire(other.state_dict())
    await server.start_weight_update(4)
    for start in range(0, len(items), 3):
        await server.put_weights(items[start : start + 3])
    await server.finish_weight_update()
    after = await server.generate([5, 6, 7], GREEDY, "b")
    assert after.extra_fields["global_steps"] == 4 and after.stop_reason == "completed"
    assert after.token_ids != before.token_ids and len(after.token_ids) == len(after.log_probs) == 8
    ids = torch.tensor([[5, 6, 7, *after.token_ids]])
    assert other(ids).logits[0, 2:-1].argmax(-1).tolist() == after.token_ids


async def test_half_an_update_is_an_error_and_no_answer_comes_from_it(make):
    server = make()
    await server.start_weight_update(4)
    await server.put_weights(wire(tiny_model("llama").state_dict())[:2])
    with pytest.raises(ValueError, match=r"missing|never arrived|lacks"):
        await server.finish_weight_update()
    with pytest.raises(RuntimeError, match="incomplete"):
        await server.generate([5, 6, 7], GREEDY, "a")
    await server.start_weight_update(5)
    await server.put_weights(wire(tiny_model("llama").state_dict()))
    await server.finish_weight_update()
    assert (await server.generate([5, 6, 7], GREEDY, "b")).extra_fields["global_steps"] == 5


async def test_an_abandoned_update_does_not_count_as_one(make):
    server, weights = make(), wire(tiny_model("llama").state_dict())
    await server.start_weight_update(4)
    await server.put_weights(weights)  # whole, but its sender died before it could say so
    await server.start_weight_update(5)
    for start in range(0, len(weights), 2):
        await server.put_weights(weights[start : start + 2])
    await server.finish_weight_update()
    assert (await server.generate([5, 6, 7], GREEDY, "a")).extra_fields["global_steps"] == 5


async def test_an_unknown_name_fails_the_update_by_name(make):
    server = make()
    await server.start_weight_update(4)
    unknown = [("no.such.weight", torch.float32, torch.Size([1]), np.zeros(4, np.uint8))]
    await server.put_weights([*wire(tiny_model("llama").state_dict()), *unknown])
    with pytest.raises(ValueError, match="no.such.weight"):
        await server.finish_weight_update()


async def test_weights_without_a_start_are_refused(make):
    with pytest.raises(RuntimeError, match="without start_weight_update"):
        await make().put_weights([("w", torch.float32, torch.Size([1]), np.zeros(4, np.uint8))])


async def test_a_request_waits_for_the_resume_and_aborts_keep_what_they_have(make):
    server = make()
    assert (await server.abort_all_requests())["aborted_count"] == 0
    waiting = asyncio.ensure_future(server.generate([5, 6, 7], GREEDY, "a"))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await server.resume_generation()
    assert len((await waiting).token_ids) == 8
    await server.abort_all_requests(reject_request=True)
    rejected = await server.generate([5, 6, 7], GREEDY, "b")
    assert (rejected.stop_reason, rejected.token_ids) == ("aborted", [])


async def test_sleep_and_wake_keep_the_weights(make):
    server = make()
    before = await server.generate([5, 6, 7], GREEDY, "a")
    await server.wait_for_requests_to_drain()
    await server.sleep()
    await server.wake_up(["weights"])
    assert (await server.generate([5, 6, 7], GREEDY, "b")).token_ids == before.token_ids


async def test_a_prompt_without_room_and_an_image_are_refused(make):
    server = make()
    with pytest.raises(ValueError, match="no room for an answer") as error:
        await server.generate([5] * 24, GREEDY, "a")
    assert "at most 23" in str(error.value) and "max_model_len" in str(error.value)
    with pytest.raises(ValueError, match="text only"):
        await server.generate([5], GREEDY, "b", image_data=[object()])


def test_a_rollout_longer_than_the_model_sees_is_refused(make):
    with pytest.raises(ValueError, match="max_position_embeddings") as error:
        make(response_length=100)
    assert "116 tokens" in str(error.value) and "at most 64" in str(error.value)


def test_sleep_level_two_with_an_adapter_is_refused(monkeypatch):
    model_config = SimpleNamespace(lora_rank=4, lora={})
    with pytest.raises(ValueError, match="sleep level 2"):
        NativeServer(config(engine_kwargs={"native": {"sleep_level": 2}}), model_config, replica_rank=0, num_threads=1)


def test_a_port_in_use_names_the_port_and_what_to_do():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(RuntimeError, match=f"can't listen on 127.0.0.1:{port}") as error:
            module._listen("127.0.0.1", port - 1, replica_rank=1)
    assert f"native.port={port - 1}" in str(error.value) and f"ss -ltnp sport = :{port}" in str(error.value)


def test_a_replica_of_several_processes_is_refused(monkeypatch):
    from verl_fl.rollout.native import replica

    sizes = SimpleNamespace(tensor_model_parallel_size=2, data_parallel_size=1, pipeline_model_parallel_size=1)
    stock = replica.RolloutReplica
    monkeypatch.setattr(stock, "__init__", lambda self: vars(self).update(world_size=2, config=sizes))
    with pytest.raises(ValueError, match="is one process") as error:
        replica.NativeReplica()
    assert "rollout.tensor_model_parallel_size=2" in str(error.value)


async def test_an_update_whose_rest_will_not_come_is_ended_and_requests_hear_why(make):
    server = make()
    weights = wire(tiny_model("llama").state_dict())
    await server.start_weight_update(4)
    await server.put_weights(weights[:2])
    await server.fail_weight_update("SyncError: the trainer is gone")
    with pytest.raises(RuntimeError, match="the trainer is gone"):
        await asyncio.wait_for(server.generate([1, 2, 3], {"max_tokens": 2}, "r"), 5)
    await server.fail_weight_update("again")  # nothing is left to end
    await server.start_weight_update(5)
    await server.put_weights(weights)
    await server.finish_weight_update()
    assert server.global_steps == 5
