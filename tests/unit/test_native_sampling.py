"""The sampler: bounds of its parameters, its law against independent references, precision, reproducibility."""

import pytest
import torch
from test_native_models import VOCAB, drain, engine_for, greedy, prompts_of, run, tiny_model

from verl_fl.rollout.native.sampling import BatchSampler, SamplingParams, draw, penalise

CPU = torch.device("cpu")


def test_verl_style_dict_is_understood():
    params = SamplingParams.from_dict(
        {"temperature": 0, "top_p": None, "top_k": 0, "logprobs": 0, "stop": "x", "max_new_tokens": 7, "n": 1},
        default_max_tokens=3,
    )
    assert (params.temperature, params.top_p, params.top_k) == (0, 1.0, 0)
    assert (params.logprobs, params.stop, params.max_tokens) == (True, ("x",), 7)
    assert SamplingParams.from_dict({"logprobs": None}, default_max_tokens=3).logprobs is False
    assert SamplingParams.from_dict({"logprobs": False}, default_max_tokens=3).logprobs is False
    assert SamplingParams.from_dict({}, default_max_tokens=3).max_tokens == 3


def test_unknown_parameter_names_the_key_and_the_legal_ones():
    with pytest.raises(ValueError, match=r"'tempreature'.*legal are.*temperature.*Remove"):
        SamplingParams.from_dict({"tempreature": 1.0}, default_max_tokens=1)


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_k": -2},
        {"min_p": -0.1},
        {"repetition_penalty": 0},
        {"max_tokens": 0},
        {"min_tokens": 99},
        {"stop": [""]},
        {"n": 2},
    ],
)
def test_value_out_of_bounds_is_refused_by_name(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        SamplingParams.from_dict(bad, default_max_tokens=10)


def expected_law(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Probabilities of one row, written down from the definitions, token by token."""
    scaled = (logits.double() / temperature).tolist()
    order = sorted(range(len(scaled)), key=lambda i: -scaled[i])
    order = order[: top_k or len(order)]
    weights = torch.tensor([scaled[i] for i in order]).softmax(0).tolist()
    kept, mass = [], 0.0
    for token, weight in zip(order, weights, strict=True):
        if mass < top_p and weight >= min_p * weights[0]:
            kept.append((token, weight))
        mass += weight
    law = torch.zeros(len(scaled), dtype=torch.float64)
    for token, weight in kept:
        law[token] = weight / sum(w for _, w in kept)
    return law


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.6},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.2},
        {"top_k": 30, "top_p": 0.7, "min_p": 0.05, "temperature": 1.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("vocab", [40, 700])
def test_drawn_tokens_follow_the_law(settings, vocab):
    """Total variation against an independent reference; 40,000 draws of <= 700 outcomes differ by < 0.06 in chance."""
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(3)) * 2
    rows, rounds = 1000, 40
    sampler = BatchSampler([SamplingParams(max_tokens=1, **settings)] * rows, CPU)
    u = torch.rand(rounds, rows, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    counts = torch.zeros(vocab, dtype=torch.float64)
    for i in range(rounds):
        tokens, _ = sampler(logits.expand(rows, -1), u[i].tolist())
        counts += torch.bincount(tokens, minlength=vocab)
    law = expected_law(logits, **settings)
    assert counts[law == 0].sum() == 0
    assert 0.5 * (counts / counts.sum() - law).abs().sum() < 0.06


def test_rows_of_one_batch_keep_their_own_settings():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    settings = [{"temperature": 0}, {"top_k": 1}, {}, {"top_p": 1e-6}]
    sampler = BatchSampler([SamplingParams(max_tokens=1, logprobs=True, **s) for s in settings], CPU)
    best = logits.argmax(-1).tolist()
    for u in (0.0, 0.5, 0.999):
        tokens, log_probs = sampler(logits, [u] * 4)
        assert [tokens[i] for i in (0, 1, 3)] == [best[i] for i in (0, 1, 3)]
        expected = torch.log_softmax(logits, -1).gather(1, tokens[:, None])[:, 0]
        torch.testing.assert_close(log_probs, expected, atol=1e-5, rtol=0)


def test_top_p_beyond_the_first_candidates_sorts_them_all():
    """A flat law keeps more tokens than the sampler looks at first."""
    sampler = BatchSampler([SamplingParams(max_tokens=1, top_p=0.9)] * 500, CPU)
    tokens, _ = sampler(torch.zeros(500, 4000), torch.linspace(0, 0.999, 500).tolist())
    assert len(tokens.unique()) == 500


def test_token_of_probability_zero_is_never_drawn():
    probs = torch.zeros(3, 1000)
    probs[:, [255, 256, 700]] = torch.tensor([0.5, 0.25, 0.25])
    for u in (0.0, 0.49999999, 0.5, 0.75, 1 - 2**-53):
        tokens = draw(probs, torch.full((3, 1), u, dtype=torch.float64))
        assert (probs.gather(1, tokens[:, None]) > 0).all(), u


def test_draw_is_exact_over_a_large_vocabulary():
    """Where an fp32 running sum over 150,000 entries drifts, the drawn index must still sit at the fp64 quantile."""
    probs = torch.softmax(torch.randn(1, 150_001, generator=torch.Generator().manual_seed(0)), -1)
    u = torch.linspace(0.0005, 0.9995, 200, dtype=torch.float64)
    tokens = torch.cat([draw(probs, x.view(1, 1)) for x in u])
    cdf = probs[0].double().cumsum(0) / probs.double().sum()
    above, below = cdf[tokens] - u, u - (cdf[tokens] - probs[0, tokens])
    assert above.min() > -1e-7 and below.min() > -1e-7


def test_repetition_penalty_is_the_one_of_transformers():
    from transformers import RepetitionPenaltyLogitsProcessor

    ids, logits = torch.tensor([[3, 4, 4]]), torch.randn(1, 10, generator=torch.Generator().manual_seed(0))
    seen = torch.zeros(1, 10, dtype=torch.bool).index_fill_(1, ids[0], True)
    expected = RepetitionPenaltyLogitsProcessor(1.7)(ids, logits.clone())
    torch.testing.assert_close(penalise(logits, seen, torch.tensor([[1.7]])), expected, rtol=0, atol=0)


def test_repetition_penalty_in_the_engine_equals_generate():
    model, prompt = tiny_model(), prompts_of(30)[0]
    ids = model.generate(
        torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=None, repetition_penalty=3.0
    )
    penalised, free = run(engine_for(tiny_model()), [prompt] * 2, [greedy(40, repetition_penalty=3.0), greedy(40)])
    assert penalised.token_ids == ids[0, len(prompt) :].tolist() != free.token_ids


def test_same_seed_gives_the_same_tokens_in_another_batch():
    params = SamplingParams(max_tokens=20, seed=11, ignore_eos=True)
    first, *others = prompts_of(7, 12, 3, 20)
    alone = run(engine_for(tiny_model()), [first], params)[0].token_ids
    engine = engine_for(tiny_model())
    for i, prompt in enumerate(others):
        engine.add_request(f"other {i}", prompt, SamplingParams(max_tokens=5 + 9 * i, top_k=3))
        engine.step()
    engine.add_request("mine", first, params)
    assert drain(engine)["mine"].token_ids == alone
    assert run(engine, [first], SamplingParams(max_tokens=20, seed=12, ignore_eos=True))[0].token_ids != alone


def test_no_end_token_before_min_tokens():
    prompt = prompts_of(6)[0]
    free = run(engine_for(tiny_model()), [prompt], greedy(20))[0].token_ids
    stop = free[3]
    engine = engine_for(tiny_model(), eos_token_ids=[stop])
    early, late = run(engine, [prompt] * 2, [greedy(20, ignore_eos=False), greedy(20, ignore_eos=False, min_tokens=9)])
    assert early.token_ids == free[: free.index(stop) + 1] and early.stop_reason == stop
    assert stop not in late.token_ids[:8] and len(late.token_ids) >= 9


def test_prompt_of_another_vocabulary_is_refused():
    with pytest.raises(ValueError, match=f"token id {VOCAB}; legal are 0 to {VOCAB - 1}"):
        engine_for(tiny_model()).add_request("a", [VOCAB], greedy(1))
