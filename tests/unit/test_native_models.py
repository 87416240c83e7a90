"""The native engine against `transformers.generate`, for every family it is tested with. Also builds their models."""

import functools

import pytest
import torch
import transformers

from verl_fl.rollout.native.engine import NativeEngine
from verl_fl.rollout.native.sampling import SamplingParams

VOCAB = 300
_WINDOW = {"sliding_window": 6}
_HEAD = {"head_dim": 16}
FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", _HEAD),
    "mistral": ("MistralConfig", _WINDOW),
    "gemma": ("GemmaConfig", _HEAD),
    "gemma2": (
        "Gemma2Config",
        {
            **_HEAD,
            **_WINDOW,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 16,
        },
    ),
    "gemma3": ("Gemma3TextConfig", {**_HEAD, **_WINDOW, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16}),
    "phi3": ("Phi3Config", {}),
    "phi": ("PhiConfig", {}),
}


def tiny_model(family: str = "qwen2", *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes):
    """A two-layer model with weights large enough that its greedy output depends on what it has read."""
    name, extra = FAMILIES[family]
    config = getattr(transformers, name)(
        **{
            **dict(vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2),
            **dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256),
            **dict(pad_token_id=0, eos_token_id=1, bos_token_id=2),
            **extra,
            **changes,
        }
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=dtype).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.25 if parameter.ndim > 1 else parameter + 0.1 * noise)
    return model


def engine_for(model, **kwargs) -> NativeEngine:
    return NativeEngine(model, **{"eos_token_ids": [1], "max_model_len": 128, **kwargs})


def prompts_of(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def greedy(max_tokens: int, **kwargs) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, **{"ignore_eos": True, **kwargs})


def drain(engine: NativeEngine) -> dict:
    outputs = {}
    while engine.has_work():
        outputs.update({o.request_id: o for o in engine.step()})
    return outputs


def run(engine: NativeEngine, prompts, params) -> list:
    """Outputs in the order of the prompts; params: one for all, or a list."""
    params = params if isinstance(params, list) else [params] * len(prompts)
    for i, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(str(i), prompt, p)
    outputs = drain(engine)
    return [outputs[str(i)] for i in range(len(prompts))]


def reference(model, prompt: list[int], tokens: int) -> list[int]:
    """What transformers generates greedily for this prompt alone, ignoring end tokens."""
    out = model.generate(torch.tensor([prompt]), max_new_tokens=tokens, do_sample=False, eos_token_id=None)
    return out[0, len(prompt) :].tolist()


@functools.cache
def references(family: str) -> tuple:
    prompts = prompts_of(3, 17, 9, 30, 1)
    model = tiny_model(family)
    return prompts, [reference(model, p, 14) for p in prompts]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_generate_for_a_batch_of_mixed_lengths(family):
    prompts, expected = references(family)
    assert len({tuple(e) for e in expected}) == len(prompts), "the reference must depend on the prompt"
    outputs = run(engine_for(tiny_model(family)), prompts, greedy(14))
    assert [o.token_ids for o in outputs] == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_generate_when_requests_join_mid_flight(family):
    prompts, expected = references(family)
    engine, outputs = engine_for(tiny_model(family)), {}
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, greedy(14))
        for _ in range(3):
            outputs.update({o.request_id: o for o in engine.step()})
    outputs.update(drain(engine))
    assert [outputs[str(i)].token_ids for i in range(len(prompts))] == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_equal_a_plain_forward_pass(family):
    """Finer than greedy tokens: a wrong mask or soft cap may leave the likeliest token as it is."""
    temperature, prompts = 0.7, prompts_of(11, 4, 17)
    params = SamplingParams(max_tokens=12, temperature=temperature, logprobs=True, seed=1, ignore_eos=True)
    plain = tiny_model(family)
    for prompt, output in zip(prompts, run(engine_for(tiny_model(family)), prompts, params), strict=True):
        with torch.no_grad():
            logits = plain(torch.tensor([prompt + output.token_ids])).logits[0, len(prompt) - 1 : -1]
        law = torch.log_softmax(logits.float() / temperature, -1)
        expected = law.gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(output.log_probs), expected, atol=1e-4, rtol=0)


def test_bfloat16_logits_stay_close_to_the_plain_model():
    """The swapped linears and norms at the precision they are for; bf16 keeps 8 bits, hence the tolerance."""
    plain, engine = tiny_model(dtype=torch.bfloat16), engine_for(tiny_model(dtype=torch.bfloat16))
    output = run(engine, prompts_of(20), SamplingParams(max_tokens=20, seed=0, logprobs=True, ignore_eos=True))[0]
    with torch.no_grad():
        logits = plain(torch.tensor([prompts_of(20)[0] + output.token_ids])).logits[0, 19:-1].float()
    expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
    assert (torch.tensor(output.log_probs) - expected).abs().mean() < 0.1


def test_model_with_recurrent_state_is_refused_with_the_reason():
    config = transformers.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, state_size=4)
    with pytest.raises(ValueError, match=r"cannot serve MambaForCausalLM.*attention interface"):
        engine_for(transformers.AutoModelForCausalLM.from_config(config))


def test_hybrid_model_is_refused_with_the_reason():
    config = transformers.Qwen3NextConfig(
        **dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2),
        **dict(num_key_value_heads=1, head_dim=16, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16),
        **dict(linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=16, linear_value_head_dim=16),
        shared_expert_intermediate_size=16,
    )
    with pytest.raises(ValueError, match="cannot serve Qwen3NextForCausalLM"):
        engine_for(transformers.AutoModelForCausalLM.from_config(config))


def test_encoder_decoder_model_is_refused():
    config = transformers.T5Config(vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(ValueError, match="encoder-decoder"):
        engine_for(transformers.T5ForConditionalGeneration(config))
