"""Scheduling in the native engine: sharing, preemption, limits, stopping, sleeping."""

import pytest
import torch
from test_native_models import drain, engine_for, greedy, prompts_of, reference, run, tiny_model

from verl_fl.rollout.native.sampling import SamplingParams

BYTES_PER_TOKEN = 2 * 2 * 2 * 16 * 4  # keys and values, layers, kv heads, head dims, fp32


def test_identical_prompts_are_computed_once_and_give_what_separate_requests_give():
    prompt, other = prompts_of(12, 7)
    params = [SamplingParams(max_tokens=10, seed=s, ignore_eos=True) for s in range(4)]
    separate = [run(engine_for(tiny_model()), [prompt], p)[0].token_ids for p in params]
    engine = engine_for(tiny_model())
    computed = []
    engine.runner.model.register_forward_pre_hook(
        lambda m, args, kwargs: computed.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    outputs = run(engine, [prompt, prompt, other, prompt, prompt], [*params[:2], params[0], *params[2:]])
    assert [outputs[i].token_ids for i in (0, 1, 3, 4)] == separate
    assert computed[0] == (2, 12)
    assert sorted(o.num_cached_tokens for o in outputs) == [0, 0, 12, 12, 12]


def test_identical_prompt_that_comes_later_shares_with_the_running_one():
    prompt = prompts_of(12)[0]
    params = [SamplingParams(max_tokens=10, seed=s, ignore_eos=True) for s in range(2)]
    separate = [run(engine_for(tiny_model()), [prompt], p)[0].token_ids for p in params]
    engine = engine_for(tiny_model())
    engine.add_request("0", prompt, params[0])
    for _ in range(4):
        engine.step()
    engine.add_request("1", prompt, params[1])
    outputs = drain(engine)
    assert [outputs[i].token_ids for i in "01"] == separate
    assert outputs["1"].num_cached_tokens == 11


def test_preemption_under_a_tiny_budget_gives_the_same_tokens():
    prompts = prompts_of(5, 9, 14, 3)
    expected = [reference(tiny_model(), p, 40) for p in prompts]
    engine = engine_for(tiny_model(), kv_cache_bytes=120 * BYTES_PER_TOKEN)
    outputs = run(engine, prompts, greedy(40))
    assert [o.token_ids for o in outputs] == expected
    assert sum(o.num_preempted for o in outputs) > 0
    assert engine.runner.cache.slots * engine.runner.cache.capacity <= 120


def test_newest_request_is_the_one_preempted():
    prompts = prompts_of(5, 5, 5)
    engine = engine_for(tiny_model(), kv_cache_bytes=90 * BYTES_PER_TOKEN)
    outputs = run(engine, prompts, greedy(40))
    assert outputs[0].num_preempted == 0 < outputs[2].num_preempted


def test_prompt_that_can_never_fit_is_refused_with_numbers():
    engine = engine_for(tiny_model(), kv_cache_bytes=20 * BYTES_PER_TOKEN)
    with pytest.raises(ValueError, match=r"prompt of 20 tokens; legal are 1 to 19 .*KV cache 20 tokens"):
        engine.add_request("a", prompts_of(20)[0], greedy(1))
    with pytest.raises(ValueError, match="max_model_len 128"):
        engine_for(tiny_model()).add_request("a", prompts_of(128)[0], greedy(1))
    with pytest.raises(ValueError, match="prompt of 0 tokens"):
        engine.add_request("a", [], greedy(1))


def test_more_requests_than_slots_wait_their_turn():
    prompts = prompts_of(*range(3, 13))
    engine = engine_for(tiny_model(), max_num_seqs=3, max_prefill_tokens=20)
    expected = [reference(tiny_model(), p, 6) for p in prompts]
    for i, p in enumerate(prompts):
        engine.add_request(str(i), p, greedy(6))
    outputs, most = {}, 0
    while engine.has_work():
        outputs.update({o.request_id: o for o in engine.step()})
        most = max(most, engine.num_requests()[0])
    assert [outputs[str(i)].token_ids for i in range(10)] == expected
    assert most == 3


def test_generation_ends_at_max_model_len():
    output = run(engine_for(tiny_model(), max_model_len=20), prompts_of(15), greedy(50))[0]
    assert len(output.token_ids) == 5 and output.finish_reason == "length"


def test_stop_token_is_part_of_the_output_and_named():
    prompt = prompts_of(8)[0]
    free = run(engine_for(tiny_model()), [prompt], greedy(20))[0].token_ids
    output = run(engine_for(tiny_model()), [prompt], greedy(20, stop_token_ids=(free[5],)))[0]
    assert output.token_ids == free[: free.index(free[5]) + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", free[5])


def test_abort_returns_the_partial_tokens_and_the_rest_goes_on():
    prompts = prompts_of(5, 8, 6)
    expected = [reference(tiny_model(), p, 12) for p in prompts]
    engine = engine_for(tiny_model())
    for i, p in enumerate(prompts):
        engine.add_request(str(i), p, greedy(12))
    for _ in range(5):
        engine.step()
    (aborted,) = engine.abort(["0", "nobody"])
    assert (aborted.finish_reason, aborted.token_ids) == ("abort", expected[0][:5])
    outputs = drain(engine)
    assert [outputs[i].token_ids for i in "12"] == expected[1:]
    # Prompt and partial answer as a new prompt continue as if nothing had happened.
    continued = run(engine, [prompts[0] + aborted.token_ids], greedy(7))[0].token_ids
    assert aborted.token_ids + continued == expected[0]


def test_sleep_keeps_requests_and_level_2_needs_new_weights():
    prompt = prompts_of(6)[0]
    weights = {k: v.clone() for k, v in tiny_model().state_dict().items()}
    expected = reference(tiny_model(), prompt, 10)
    engine = engine_for(tiny_model())
    engine.add_request("a", prompt, greedy(10))
    engine.step()
    engine.sleep(2)
    assert engine.runner.cache.slots == 0 and not engine.has_work()
    assert all(p.numel() == 0 for p in engine.runner.model.parameters())
    with pytest.raises(RuntimeError, match="incomplete.*sleep"):
        engine.add_request("b", prompt, greedy(1))
    engine.wake()
    with pytest.raises(RuntimeError, match="full update_weights"):
        engine.step()
    engine.update_weights(weights.items())
    output = drain(engine)["a"]
    assert output.token_ids == expected and output.num_preempted == 1


def test_sleep_level_1_frees_the_cache_and_refuses_until_wake():
    engine = engine_for(tiny_model())
    before = run(engine, prompts_of(6), greedy(5))[0].token_ids
    engine.sleep(1)
    assert engine.runner.cache.keys == []
    with pytest.raises(RuntimeError, match="wake"):
        engine.add_request("b", [5], greedy(1))
    engine.wake()
    assert run(engine, prompts_of(6), greedy(5))[0].token_ids == before
    with pytest.raises(ValueError, match="legal are 1"):
        engine.sleep(3)


class Letters:
    """Token i is one letter, but 200 to 203 are the four bytes of one character."""

    def decode(self, ids, skip_special_tokens=True):
        data = b"".join("😀".encode()[i - 200 : i - 199] if 200 <= i < 204 else bytes([97 + i % 26]) for i in ids)
        return data.decode(errors="replace")


@pytest.mark.parametrize(
    ("tokens", "stop", "length"),
    [
        ([0, 1, 2, 3, 4], ("cd",), 4),
        ([0, 1, 2, 3, 4], ("x", "abcde"), 5),
        ([0, 200, 201, 202, 203, 1], ("😀",), 5),
        ([0, 200, 201, 202, 203, 1, 2], ("😀b",), 6),
        ([0, 1, 0, 1, 2], ("abc",), 5),
    ],
)
def test_stop_string_is_found_where_it_completes_across_tokens(tokens, stop, length):
    from verl_fl.rollout.native._stop import StopStrings

    finder = StopStrings(Letters(), stop)
    hits = [finder.found(tokens[: i + 1]) for i in range(len(tokens))]
    assert [bool(h) for h in hits].index(True) + 1 == length


def test_stop_string_ends_the_request():
    prompt = prompts_of(8)[0]
    free = run(engine_for(tiny_model()), [prompt], greedy(20))[0].token_ids
    stop = Letters().decode(free[4:7])
    length = next(i for i in range(1, 21) if stop in Letters().decode(free[:i]))
    output = run(engine_for(tiny_model(), tokenizer=Letters()), [prompt], greedy(20, stop=(stop,)))[0]
    assert output.token_ids == free[:length]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    with pytest.raises(ValueError, match="no tokenizer"):
        engine_for(tiny_model()).add_request("a", prompt, greedy(20, stop=(stop,)))


def test_cache_growth_keeps_what_is_stored():
    """Long answers cross several doublings of capacity, more requests several of slots."""
    prompts = prompts_of(*[60] * 5)
    expected = [reference(tiny_model(), p, 60) for p in prompts]
    engine, outputs = engine_for(tiny_model()), {}
    for i, p in enumerate(prompts):
        engine.add_request(str(i), p, greedy(60))
        outputs.update({o.request_id: o for o in engine.step()})
    outputs.update(drain(engine))
    assert [outputs[str(i)].token_ids for i in range(5)] == expected
    assert torch.isfinite(engine.runner.cache.keys[0]).all()


def test_a_cache_smaller_than_the_model_length_ends_the_answer_and_says_so(caplog):
    model = tiny_model("llama")
    bytes_per_token = 2 * 2 * 2 * 16 * 4  # layers, key and value, heads, dims, fp32
    engine = engine_for(model, max_model_len=128, kv_cache_bytes=20 * bytes_per_token)
    engine.add_request("a", [5] * 8, SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True))
    engine.add_request("b", [6] * 8, SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
    outputs = {}
    while engine.has_work():
        outputs |= {output.request_id: output for output in engine.step()}
    assert (outputs["a"].finish_reason, len(outputs["a"].token_ids)) == ("length", 12)
    assert len(outputs["b"].token_ids) == 4
    assert "answers end at 20 tokens instead of max_model_len 128" in caplog.text
