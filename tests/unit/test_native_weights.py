"""Weight and LoRA updates of the native engine."""

import pytest
import torch
from test_native_models import drain, engine_for, greedy, prompts_of, reference, run, tiny_model


def state(seed: int, **changes) -> dict:
    return {k: v.clone() for k, v in tiny_model(seed=seed, **changes).state_dict().items()}


def test_update_serves_the_new_weights_and_running_requests_continue_on_them():
    prompt = prompts_of(9)[0]
    old, new = tiny_model(seed=0), tiny_model(seed=1)
    engine = engine_for(tiny_model(seed=0))
    engine.update_weights(state(0).items(), version=3)
    engine.add_request("a", prompt, greedy(12))
    for _ in range(5):
        engine.step()
    engine.update_weights(state(1).items(), version=4)
    output = drain(engine)["a"]
    before = reference(old, prompt, 5)
    assert output.token_ids == before + reference(new, prompt + before, 7)
    assert (output.weight_version_min, output.weight_version_max, output.num_preempted) == (3, 4, 1)
    fresh = run(engine, [prompt], greedy(12))[0]
    assert fresh.token_ids == reference(new, prompt, 12) and fresh.weight_version_min == 4


def test_update_casts_to_the_served_dtype():
    engine = engine_for(tiny_model())
    engine.update_weights((name, t.double()) for name, t in state(1).items())
    assert run(engine, prompts_of(5), greedy(8))[0].token_ids == reference(tiny_model(seed=1), prompts_of(5)[0], 8)


def test_bfloat16_update_reaches_the_prepacked_copies():
    first = engine_for(tiny_model(seed=1, dtype=torch.bfloat16))
    updated = engine_for(tiny_model(seed=0, dtype=torch.bfloat16))
    updated.update_weights(state(1).items())
    prompts = prompts_of(5, 8)
    assert [o.token_ids for o in run(updated, prompts, greedy(8))] == [
        o.token_ids for o in run(first, prompts, greedy(8))
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("model.norm.weight"), "1 missing: model.norm.weight"),
        (lambda w: w.update({"model.nrom.weight": w.pop("model.norm.weight")}), "1 unknown: model.nrom.weight; 1 miss"),
        (lambda w: w.update({"model.norm.weight": torch.zeros(3)}), r"model.norm.weight \[3\] \(served: \[64\]\)"),
        (lambda w: w.update({f"no.{i}": torch.zeros(1) for i in range(13)}), "13 unknown: .*no.9 and 3 more"),
    ],
)
def test_wrong_update_is_named_and_the_engine_refuses_until_a_full_one(change, message):
    engine, weights = engine_for(tiny_model()), state(1)
    change(weights)
    with pytest.raises(ValueError, match=message):
        engine.update_weights(weights.items())
    with pytest.raises(RuntimeError, match="weights are incomplete"):
        engine.add_request("a", [5], greedy(1))
    engine.update_weights(state(1).items())
    assert run(engine, prompts_of(5), greedy(8))[0].token_ids == reference(tiny_model(seed=1), prompts_of(5)[0], 8)


def test_duplicate_name_and_broken_stream_leave_the_weights_incomplete():
    engine = engine_for(tiny_model())
    with pytest.raises(ValueError, match="1 duplicate: model.norm.weight"):
        engine.update_weights([*state(1).items(), ("model.norm.weight", torch.zeros(64))])

    def broken():
        yield from list(state(1).items())[:3]
        raise ConnectionError("the trainer is gone")

    with pytest.raises(ConnectionError):
        engine.update_weights(broken())
    with pytest.raises(RuntimeError, match="the trainer is gone"):
        engine.step()


@pytest.mark.parametrize("omitted", ["lm_head.weight", "model.embed_tokens.weight", None])
def test_tied_alias_may_be_omitted(omitted):
    weights = state(1, tie_word_embeddings=True)
    weights.pop(omitted, None)
    engine = engine_for(tiny_model(tie_word_embeddings=True))
    engine.update_weights(weights.items())
    expected = reference(tiny_model(seed=1, tie_word_embeddings=True), prompts_of(5)[0], 8)
    assert run(engine, prompts_of(5), greedy(8))[0].token_ids == expected


def adapted(seed: int, **settings):
    """A PEFT model with a random adapter, its adapter tensors and its config."""
    import peft

    config = peft.LoraConfig(
        **{"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj", "down_proj"], **settings}
    )
    model = peft.get_peft_model(tiny_model(), config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model, peft.get_peft_model_state_dict(model), config.to_dict()


@pytest.mark.parametrize(
    "settings", [{}, {"use_rslora": True}, {"alpha_pattern": {"q_proj": 3}, "rank_pattern": {"v_proj": 2}}], ids=str
)
def test_lora_equals_peft_and_a_second_update_replaces_the_first(settings):
    prompt = prompts_of(9)[0]
    engine = engine_for(tiny_model())
    base = run(engine, [prompt], greedy(10))[0].token_ids
    for seed in (1, 2, 1):
        model, tensors, config = adapted(seed, **settings)
        merged = model.merge_and_unload()
        named = {k.replace(".weight", ".default.weight"): t for k, t in tensors.items()} if seed == 2 else tensors
        engine.update_lora(named.items(), config, version=seed)
        for name, tensor in engine.runner.model.state_dict().items():
            torch.testing.assert_close(tensor, merged.state_dict()[name], atol=1e-5, rtol=0)
        tokens = run(engine, [prompt], greedy(10))[0].token_ids
        assert tokens == reference(merged, prompt, 10) != base
    engine.update_weights(state(0).items())
    assert run(engine, [prompt], greedy(10))[0].token_ids == base


def test_adapter_that_cannot_be_merged_leaves_the_weights_alone():
    engine = engine_for(tiny_model())
    before = run(engine, prompts_of(9), greedy(10))[0].token_ids
    _, tensors, config = adapted(1)
    half = {k: t for k, t in tensors.items() if not (k.endswith("lora_B.weight") and "layers.1" in k)}
    wrong = {k: t[:, :-1] if "layers.1.self_attn.q_proj.lora_A" in k else t for k, t in tensors.items()}
    cases = [
        (tensors, {**config, "use_dora": True}, "use_dora"),
        ({**tensors, "what.weight": torch.zeros(1)}, config, "what.weight"),
        (half, config, "only lora_A"),
        (wrong, config, "shape"),
        ({k.replace("q_proj", "z_proj"): t for k, t in tensors.items()}, config, "z_proj"),
    ]
    for named, settings, message in cases:
        with pytest.raises(ValueError, match=message):
            engine.update_lora(named.items(), settings)
        assert run(engine, prompts_of(9), greedy(10))[0].token_ids == before
