"""The attention override reaches every model; none, and no package, means sdpa with one warning (critic-attention)."""

import logging

import pytest
import torch


@pytest.fixture(autouse=True)
def cpu(monkeypatch, fresh_platform):
    monkeypatch.setenv("VERL_PLATFORM", "cpu")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    path = tmp_path_factory.mktemp("model")
    config = Qwen2Config(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(path)
    return str(path)


def load_config(path, override):
    from verl.workers.config import HFModelConfig

    return HFModelConfig(path=path, load_tokenizer=False, override_config=override)


@pytest.mark.parametrize(
    ("override", "expected"),
    [({}, "sdpa"), ({"attn_implementation": "eager"}, "eager"), ({"attn_implementation": "sdpa"}, "sdpa")],
)
def test_actor_reference_and_critic_get_the_override(model_dir, override, expected):
    from verl.utils.model import load_valuehead_model

    config = load_config(model_dir, override)
    assert config.hf_config._attn_implementation == expected
    config.hf_config.num_labels = 1
    critic = load_valuehead_model(model_dir, torch.float32, config.hf_config, False)
    assert critic.config._attn_implementation == expected
    values = critic(input_ids=torch.tensor([[1, 2, 3]])).logits
    assert values.shape == (1, 3, 1) and torch.isfinite(values).all()


def test_the_missing_default_is_warned_about_once(model_dir, caplog):
    from verl_fl.patches import attention

    attention._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "verl_fl.engine"):
        load_config(model_dir, {})
        load_config(model_dir, {})
    assert [record.message for record in caplog.records if "sdpa" in record.message] == [
        "engine: attn_implementation=sdpa, verl's default flash_attention_2 is not here "
        "(FlashAttention has no CPU kernel; torch's sdpa is used)"
    ]


def test_asking_for_flash_attention_on_a_cpu_is_an_error(model_dir):
    with pytest.raises(ValueError, match="can't run on this platform") as error:
        load_config(model_dir, {"attn_implementation": "flash_attention_2"})
    assert "sdpa, eager" in str(error.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_padding_and_masked_rows_do_not_touch_valid_positions(model_dir, implementation, dtype):
    """Lengths 3 and 0 and one left-padded row, length 5 (fully-masked-row)."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation=implementation, dtype=dtype)
    ids = torch.tensor([[5, 6, 7, 0, 0], [0, 0, 0, 0, 0], [0, 0, 5, 6, 7]])
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0], [0, 0, 1, 1, 1]])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    alone = model(input_ids=torch.tensor([[5, 6, 7]])).logits[0]
    tolerance = 1e-5 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(logits[0, :3], alone, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(logits[2, 2:], alone, atol=tolerance, rtol=tolerance)
    assert torch.isfinite(logits).all()
    logits[mask.bool()].float().sum().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())
