"""verl's checkpoint engine ``fl``, driven as verl's manager drives it, without Ray."""

import asyncio
import json
from types import SimpleNamespace

import pytest
import ray
import torch
import verl.checkpoint_engine.base as base
from verl.workers.engine_workers import ActorRolloutRefWorker

from verl_fl.patches.weights import plain
from verl_fl.rollout.native.weights import ServedWeights
from verl_fl.weight_sync import SyncError
from verl_fl.weight_sync.engine import FLCheckpointEngine


@pytest.fixture(autouse=True)
def loopback(monkeypatch):
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")


class Server:
    """The inference server's end of a rollout worker: a model, and what it was told."""

    def __init__(self, model):
        self.model, self.weights, self.told = model, ServedWeights(model), []

    async def update_weights(self, weights, global_steps=None, wire_format="", peft_config=None, base_sync_done=False):
        self.told.append((global_steps, peft_config))
        items = [(name, tensor.clone()) async for name, tensor in weights]
        if peft_config is None:
            self.weights.load(items)
        else:
            self.weights.load_lora(items, peft_config)


class Job:
    """A trainer of some ranks and some rollout workers, in this process."""

    def __init__(self, num_trainers=1, servers=(), **kwargs):
        kwargs = {"timeout_s": 10.0} | kwargs
        self.trainers = [FLCheckpointEngine(1 << 20, is_master=k == 0, **kwargs) for k in range(num_trainers)]
        self.workers = [
            SimpleNamespace(checkpoint_engine=FLCheckpointEngine(1 << 20, **kwargs), server_adapter=s) for s in servers
        ]

    def connect(self):
        engines = self.trainers + [worker.checkpoint_engine for worker in self.workers]
        metadata = [engine.prepare() for engine in engines]
        groups = FLCheckpointEngine.build_topology(len(self.trainers), len(self.workers), metadata)
        kwargs = [dict(zip(group, row, strict=True)) for group in groups for row in zip(*group.values(), strict=True)]
        for engine, each in zip(engines, kwargs, strict=True):
            engine.init_process_group(**each)

    def sync(self, send, step):
        """One sync; the trainer's results, then the workers', errors among them."""
        self.connect()
        update = base.CheckpointEngineWorker.update_weights

        async def main():
            jobs = [asyncio.to_thread(asyncio.run, send(k, step)) for k in range(len(self.trainers))]
            jobs += [update(worker, step) for worker in self.workers]
            return await asyncio.gather(*jobs, return_exceptions=True)

        results = asyncio.run(main())
        for engine in self.trainers + [worker.checkpoint_engine for worker in self.workers]:
            engine.finalize()
        return results

    def close(self):
        for engine in self.trainers + [worker.checkpoint_engine for worker in self.workers]:
            for end in (engine._sender, engine._receiver):
                if end is not None:
                    end.close()


def _model(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 4))


@pytest.mark.parametrize("delta", [False, True])
def test_two_ranks_and_two_replicas_of_which_one_joins_late(delta):
    servers = [Server(_model(9)), Server(_model(9))]
    job = Job(2, servers[:1], delta=delta)

    def send(rank, step):
        return job.trainers[rank].send_weights(iter(_model(step).state_dict().items()), global_steps=step)

    try:
        first, second, worker = job.sync(send, 1)
        assert worker is None and second == {} and first["weight_sync/bytes"] > 300
        late = FLCheckpointEngine(1 << 20, timeout_s=10.0, delta=delta)
        job.workers.append(SimpleNamespace(checkpoint_engine=late, server_adapter=servers[1]))
        results = job.sync(send, 2)
        assert results[2:] == [None, None], results
        for server in servers:
            for name, tensor in _model(2).state_dict().items():
                assert torch.equal(server.model.state_dict()[name], tensor)
        assert [step for step, _ in servers[0].told] == [1, 2]
    finally:
        job.close()


def test_a_rollout_that_refuses_the_weights_fails_its_worker_and_the_next_sync_works():
    """The bytes arrived, so the trainer's part ends well; verl gets the worker's error."""
    server = Server(_model(9))
    job = Job(1, [server])

    def send(rank, step):
        weights = _model(step).state_dict()
        if step == 1:
            weights["stranger"] = torch.zeros(3)
        return job.trainers[rank].send_weights(weights, global_steps=step)

    try:
        _, worker = job.sync(send, 1)
        assert isinstance(worker, ValueError) and "1 unknown: stranger" in str(worker)
        assert server.weights.incomplete
        assert job.sync(send, 2)[1] is None
        assert torch.equal(server.model[0].weight, _model(2)[0].weight)
    finally:
        job.close()


class Broken(Server):
    """Gives up at the second tensor."""

    async def update_weights(self, weights, **_):
        async for name, _ in weights:
            if name == "1.weight":
                raise RuntimeError("no room for it")


def test_a_rollout_that_gives_up_in_the_middle_fails_the_sync_at_every_end():
    job = Job(1, [Broken(_model(9)), Server(_model(9))])
    try:
        sent, broken, other = job.sync(lambda rank, step: job.trainers[0].send_weights(_model(1).state_dict(), step), 1)
        assert isinstance(broken, RuntimeError) and "no room" in str(broken)
        assert isinstance(sent, SyncError) and isinstance(other, SyncError)
        assert "stopped" in str(sent) and "1.weight" in str(sent)
    finally:
        job.close()


class Adapted:
    """verl's engine of a LoRA model: the base without the adapter, or the adapter alone."""

    def __init__(self, model, lora_b):
        self.model, self.b = model, lora_b
        self.a = torch.ones(2, 8)

    def get_per_tensor_param(self, layered_summon=False, base_sync_done=False):
        config = {"r": 2, "lora_alpha": 4, "task_type": SimpleNamespace(value="CAUSAL_LM"), "target_modules": {"0"}}
        if not base_sync_done:
            return iter(self.model.state_dict().items()), config
        names = ("base_model.model.0.lora_A.weight", "base_model.model.0.lora_B.weight")
        return zip(names, (self.a, self.b), strict=True), config

    def _merged_lora_per_tensor_param(self):
        weights = dict(self.model.state_dict())
        weights["0.weight"] = weights["0.weight"] + 2 * self.b @ self.a
        return iter(weights.items())


@pytest.mark.parametrize("lora, load_format", [("adapter", "dummy"), ("adapter", "auto"), ("merged", "dummy")])
def test_a_lora_models_rollout_agrees_with_the_adapted_model_after_every_sync(lora, load_format):
    trained = _model(1)
    server = Server(_model(9 if load_format == "dummy" else 1))
    job = Job(1, [server], lora=lora)
    rollout = SimpleNamespace(
        checkpoint_engine=SimpleNamespace(backend="fl"), load_format=load_format, get=lambda key, default: default
    )
    worker = SimpleNamespace(config=SimpleNamespace(rollout=rollout), checkpoint_engine=job.trainers[0])
    inputs = torch.randn(3, 8)
    try:
        for step in (1, 2):
            adapted = Adapted(trained, torch.full((8, 2), 0.1 * step))
            worker.actor = SimpleNamespace(engine=adapted)
            results = job.sync(lambda rank, step: ActorRolloutRefWorker.update_weights(worker, global_steps=step), step)
            assert results[1] is None, results
            expected = trained[1](trained[0](inputs) + inputs @ (2 * adapted.b @ adapted.a).T)
            torch.testing.assert_close(server.model(inputs), expected, rtol=0, atol=1e-5)
            assert not torch.allclose(server.model(inputs), trained(inputs), atol=1e-3)
        base_syncs = [config for _, config in server.told if config is None]
        assert len(base_syncs) == {"adapter": load_format == "dummy", "merged": 2}[lora]
    finally:
        job.close()


def test_an_adapters_config_is_sent_as_json_can_say_it():
    found = plain(
        {"peft_type": SimpleNamespace(value="LORA"), "modules": {"q"}, "dtype": torch.float32, "r": 2, "x": None}
    )
    assert json.loads(json.dumps(found)) == found
    assert found == {"peft_type": "LORA", "modules": ["q"], "dtype": "torch.float32", "r": 2, "x": None}


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"on_failure": "retry"}, "on_failure='retry'\n  legal: paused, old"),
        ({"lora": "base"}, "lora='base'\n  legal: adapter, merged"),
        ({"transport": "rdma"}, "'rdma'"),
        ({"topology": "ring"}, "'ring'"),
        ({"lanes": 0}, "asked: 0"),
        ({"bucket_bytes": 100}, "bucket_bytes=100"),
    ],
)
def test_an_option_that_is_none_of_its_values_is_refused_at_once(kwargs, message):
    with pytest.raises(ValueError) as error:
        FLCheckpointEngine(1 << 20, **kwargs)
    assert message in str(error.value)


def test_a_bucket_of_no_bytes_is_refused_with_the_key_to_change():
    with pytest.raises(ValueError, match="update_weights_bucket_megabytes=0"):
        FLCheckpointEngine(0)


class Replica:
    """Counts how often it may not answer; giving up in the middle of a sync is what it does best."""

    def __init__(self):
        self.paused, self.asleep = False, False

    async def abort_all_requests(self, reject_request=False):
        self.paused = True

    async def release_kv_cache(self):
        self.asleep = True
        raise RuntimeError("this replica is gone")

    async def resume_kv_cache(self):
        self.asleep = False

    async def resume_generation(self):
        self.paused = False


@pytest.mark.parametrize("in_a_loop", [False, True])
def test_replicas_answer_again_after_a_failed_sync(monkeypatch, in_a_loop):
    manager = object.__new__(base.CheckpointEngineManager)
    manager.backend, manager.replicas, manager.actor_wg = "fl", [Replica(), Replica()], None
    for replica in manager.replicas:
        replica.workers = []
    monkeypatch.setattr(base, "RayWorkerGroup", lambda **_: None)
    monkeypatch.setattr(base, "RayClassWithInitArgs", lambda **_: None)

    async def in_loop():
        await manager.update_weights(global_steps=3)

    with pytest.raises(RuntimeError, match="this replica is gone"):
        asyncio.run(in_loop()) if in_a_loop else manager.update_weights(global_steps=3)
    assert not any(replica.paused or replica.asleep for replica in manager.replicas)
