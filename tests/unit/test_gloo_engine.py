"""The plain checkpoint engine: bit-equal for every dtype and order, and loud when nothing arrives."""

import asyncio
import itertools

import pytest
import torch

from verl_fl.weight_sync.gloo_engine import GlooCheckpointEngine, _Bucket

DTYPES = (torch.uint8, torch.bfloat16, torch.float16, torch.float32, torch.int64)


def sync(weights, *, receivers=1, bucket_size=64):
    """Send ``weights`` from one rank to ``receivers`` in this process's threads; return what each received."""
    engines = [GlooCheckpointEngine(bucket_size, is_master=rank == 0, timeout_s=20) for rank in range(receivers + 1)]
    engines[0]._store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    metadata = [{"host": "127.0.0.1", "port": engines[0]._store.port}]
    trainer, rollout = GlooCheckpointEngine.build_topology(1, receivers, metadata)
    kwargs = [
        {key: values[i] for key, values in group.items()}
        for group in (trainer, rollout)
        for i in range(len(group["rank"]))
    ]

    async def receive(engine):
        return [(name, tensor.clone()) async for name, tensor in engine.receive_weights()]

    async def main():
        await asyncio.gather(
            *[asyncio.to_thread(e.init_process_group, **k) for e, k in zip(engines, kwargs, strict=True)]
        )
        jobs = [engines[0].send_weights(iter(weights)), *[receive(engine) for engine in engines[1:]]]
        return await asyncio.gather(*jobs, return_exceptions=True)

    results = asyncio.run(main())
    for engine in engines:
        engine.finalize()
    return results


def same(received, sent):
    assert [name for name, _ in received] == [name for name, _ in sent]
    for (_, got), (_, expected) in zip(received, sent, strict=True):
        assert got.dtype == expected.dtype and got.shape == expected.shape
        assert torch.equal(
            got.contiguous().view(-1).view(torch.uint8), expected.contiguous().view(-1).view(torch.uint8)
        )


def test_every_order_of_mixed_dtypes_in_one_bucket_is_bit_equal():
    for order in itertools.permutations(DTYPES):
        weights = [(str(i), torch.arange(1, 4 + i).to(dtype)) for i, dtype in enumerate(order)]
        bucket = _Bucket(1 << 20)
        for name, tensor in weights:
            bucket.add(name, tensor)
        payload = bucket.pack()
        for (_, dtype, shape, offset), (_, tensor) in zip(bucket.entries, weights, strict=True):
            raw = payload[offset : offset + tensor.nbytes]
            assert torch.equal(raw.view(getattr(torch, dtype)).view(shape), tensor) and offset % 64 == 0


def test_weights_of_all_shapes_arrive_at_every_receiver():
    weights = [
        ("bf16", torch.randn(3, dtype=torch.bfloat16)),
        ("fp32", torch.randn(2, 5)),
        ("empty", torch.empty(0, 4)),
        ("scalar", torch.tensor(3.5)),
        ("strided", torch.arange(12.0).view(3, 4).t()),
        ("bigger than a bucket", torch.randn(1000)),
        ("int", torch.arange(5)),
    ]
    results = sync(weights, receivers=2)
    assert results[0]["weight_sync/bytes"] > 4000
    for received in results[1:]:
        same(received, weights)


def test_a_sync_without_a_tensor_is_an_error_at_the_receiver():
    results = sync([])
    assert isinstance(results[1], RuntimeError) and "no tensor" in str(results[1])


def test_only_the_first_trainer_rank_joins_the_group():
    trainer, rollout = GlooCheckpointEngine.build_topology(3, 2, [{"host": "h", "port": 1}, {}, {}, {}, {}])
    assert trainer["rank"] == [0, -1, -1] and rollout["rank"] == [1, 2]
    assert set(trainer["world_size"] + rollout["world_size"]) == {3}


def test_what_a_generator_lends_is_copied_before_it_is_taken_back():
    live = torch.ones(4)

    def lend():
        yield "w", live
        live.zero_()

    same(sync(lend())[1], [("w", torch.ones(4))])


def test_a_bucket_of_nothing_is_refused():
    with pytest.raises(ValueError, match="update_weights_bucket_megabytes=0"):
        GlooCheckpointEngine(0)
