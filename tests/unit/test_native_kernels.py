"""The C kernels against torch, in both dtypes, and an engine without them."""

import logging

import pytest
import torch
import torch.nn.functional as F
from test_native_models import engine_for, tiny_model

from verl_fl.rollout.native import _kernels
from verl_fl.rollout.native.sampling import SamplingParams

N, H, K, D, CAPACITY = 3, 6, 2, 16, 12
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
"""fp32: the order of sums and the polynomial exp; bf16: one rounding of the result, where torch rounds in between."""


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request):
    torch.manual_seed(0)
    return request.param


@pytest.fixture
def call(dtype):
    compiled = _kernels.kernels(dtype)
    assert compiled is not None, "this machine has a C compiler, so the kernels must be there"
    return compiled.call


def close(got, expected, dtype):
    torch.testing.assert_close(got.float(), expected.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_rms_norm_is_torchs(call, dtype):
    x, weight = torch.randn(N, 40).to(dtype), torch.randn(40).to(dtype)
    out = torch.empty_like(x)
    call("rms_norm", x, weight, out, N, 40, 1e-6)
    close(out, F.rms_norm(x.float(), (40,), weight.float(), 1e-6), dtype)


def test_attention_reads_each_row_to_its_own_position_and_nothing_behind_it(call, dtype):
    query, keys = torch.randn(N, H, D).to(dtype), torch.randn(N, K, CAPACITY, D).to(dtype)
    values, positions = torch.randn(N, K, CAPACITY, D).to(dtype), torch.tensor([0, 5, CAPACITY - 1])
    seen = torch.arange(CAPACITY) <= positions.view(-1, 1, 1, 1)
    expected = F.scaled_dot_product_attention(
        query.float().view(N, K, H // K, D), keys.float(), values.float(), attn_mask=seen, scale=0.3
    )
    for row, position in enumerate(positions):
        keys[row, :, position + 1 :] = values[row, :, position + 1 :] = float("nan")
    out, scratch = torch.empty_like(query), torch.empty(N * H * (CAPACITY + 2 * D))
    call("attend", query, keys, values, positions, out, scratch, N, K, H // K, D, CAPACITY, 0.3)
    close(out.view(N, K, H // K, D), expected, dtype)


@pytest.mark.parametrize("normed", [False, True])
def test_rotation_and_store_are_transformers(call, dtype, normed):
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    merged, angles = torch.randn(N, H + 2 * K, D).to(dtype), torch.randn(N, D // 2)
    cos, sin = (f(torch.cat([angles, angles], -1)).to(dtype) for f in (torch.cos, torch.sin))
    norms = [torch.randn(D).to(dtype), torch.randn(D).to(dtype)] if normed else [None, None]
    query, key, value = merged.float().split([H, K, K], dim=1)
    if normed:
        query, key = (F.rms_norm(x, (D,), w.float(), 1e-6) for x, w in ((query, norms[0]), (key, norms[1])))
    query, key = apply_rotary_pos_emb(query[:, :, None], key[:, :, None], cos.float()[:, None], sin.float()[:, None])
    keys, values = torch.zeros(2, N, K, CAPACITY, D).to(dtype)
    positions, out = torch.tensor([2, 0, 7]), torch.empty(N, H, D, dtype=dtype)
    call("rotate_and_store", merged, *norms, 1e-6, cos, sin, positions, out, keys, values, N, H, K, D, CAPACITY)
    close(out, query[:, :, 0], dtype)
    rows = torch.arange(N)
    close(keys[rows, :, positions], key[:, :, 0], dtype)
    assert torch.equal(values[rows, :, positions], merged[:, H + K :])
    keys[rows, :, positions] = 0
    assert not keys.any(), "something was written elsewhere"


def test_without_a_compiler_the_same_tokens_come_from_torchs_operators(monkeypatch, caplog):
    def tokens():
        engine = engine_for(tiny_model("llama"))
        engine.add_request("a", [5, 6, 7], SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True))
        while engine.has_work():
            done = engine.step()
        return engine._fast, done[0].token_ids

    fast, expected = tokens()
    assert fast is not None
    _kernels._library.cache_clear()
    monkeypatch.setenv("CC", "no-such-compiler")
    with caplog.at_level(logging.WARNING, "verl_fl.rollout"):
        slow, got = tokens()
    _kernels._library.cache_clear()
    assert slow is None and got == expected
    assert "no C compiler" in caplog.text


def test_a_compiler_that_fails_is_a_warning_with_its_words(monkeypatch, caplog, tmp_path):
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 'cc1: out of cheese' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    _kernels._library.cache_clear()
    with caplog.at_level(logging.WARNING, "verl_fl.rollout"):
        assert _kernels.kernels(torch.float32) is None
    _kernels._library.cache_clear()
    assert "out of cheese" in caplog.text and not list((tmp_path / "cache" / "verl_fl").iterdir())
