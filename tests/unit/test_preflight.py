"""The preflight, on verl's own config with +fl=cpu and a model of a few bytes. No Ray."""

import json
import logging
import os
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from verl_fl import _verl
from verl_fl._settings import Settings, read_settings
from verl_fl.preflight import capacity, check, cluster, data, engine, model, reward

TEMPLATE = "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
TEMPLATE += "{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A folder with config, 1,100 parameters in two files, and a tokenizer that has a chat template."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    vocabulary = {token: index for index, token in enumerate(["<unk>", "<pad>", "<eos>", "user", ":", "hi", "\n"])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>", chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", "vocab_size": 100, "dtype": "bfloat16"}))
    save_file({"a": torch.zeros(10, 100)}, folder / "model-1.safetensors")
    save_file({"b": torch.zeros(100, dtype=torch.bfloat16)}, folder / "model-2.safetensors")
    return folder


@pytest.fixture(scope="session")
def composed():
    from hydra import compose, initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=["+fl=cpu", "algorithm.adv_estimator=grpo"])


def chat(text="hi", role="user"):
    return [{"role": role, "content": text}]


def rows(count=4, **changes):
    row = {"prompt": chat(), "data_source": "toy", "reward_model": {"style": "rule", "ground_truth": "4"}}
    row = {key: value for key, value in (row | changes).items() if value is not None}
    return [row] * count


def write(path, content):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(content), path)
    return str(path)


@pytest.fixture
def config(composed, tiny_model, tmp_path):
    config = OmegaConf.create(OmegaConf.to_container(composed))
    files = write(tmp_path / "train.parquet", rows())
    config.data.update({"train_files": files, "val_files": files, "train_batch_size": 4})
    config.actor_rollout_ref.model.path = str(tiny_model)
    config.trainer.default_local_dir = str(tmp_path / "checkpoints")
    return config


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch, caplog):
    from verl.plugin.platform import PlatformRegistry

    platform = PlatformRegistry.get("cpu")()
    monkeypatch.setattr(_verl, "current_platform", lambda: platform)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    caplog.set_level(logging.WARNING)


def run(config):
    check(config, use_reference=False, use_critic=False)


def refused(config, error=ValueError):
    with pytest.raises(error) as caught:
        run(config)
    return str(caught.value)


def test_a_good_run_passes_in_silence_and_twice(config, caplog):
    run(config)
    run(config)
    assert caplog.records == []
    assert config.ray_kwargs.ray_init.resources.fl_cpu == 1
    assert config.ray_kwargs.ray_init.num_cpus >= 7


def test_verls_own_check_still_runs_after_ours(config, capsys):
    from verl.utils import config as verl_config

    config.data.train_batch_size = 100
    with pytest.raises(ValueError, match="fewer rows than one batch"):
        verl_config.validate_config(config, False, False)
    config.data.train_batch_size = 4
    config.actor_rollout_ref.actor.ppo_mini_batch_size = 4
    verl_config.validate_config(config, False, False)
    assert "All configuration checks passed" in capsys.readouterr().out


# --- settings ---


def test_without_an_fl_node_the_defaults_hold_and_a_wrong_value_is_named():
    assert read_settings(None) == read_settings(OmegaConf.create({"trainer": {}})) == Settings()
    assert read_settings(OmegaConf.create("fl: {checks: {memory: off}}")).checks__memory == "off"
    with pytest.raises(
        ValueError, match="fl.reward.on_error is none of its values\n  asked: 'stop'\n  legal: count, raise"
    ):
        read_settings(OmegaConf.create({"fl": {"reward": {"on_error": "stop"}}}))
    with pytest.raises(ValueError, match="fl.reward.timeout_s is not a number of seconds"):
        read_settings(OmegaConf.create({"fl": {"reward": {"timeout_s": 0}}}))


def test_the_config_group_states_the_defaults_of_the_code(composed):
    assert read_settings(composed) == Settings()
    assert set(composed.fl) == {"platform", "checks", "reward", "rollout"}


# --- model ---


def test_a_model_folder_that_is_not_there_is_named_with_what_is(config, tiny_model):
    config.actor_rollout_ref.model.path = str(tiny_model / "modle")
    text = refused(config)
    assert text.startswith("the model folder does not exist\n  asked: actor_rollout_ref.model.path=")
    assert f"{tiny_model} holds " in text and "config.json" in text


def test_a_model_folder_without_weights_is_refused(config, tmp_path):
    folder = tmp_path / "empty"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    config.actor_rollout_ref.model.path = str(folder)
    assert refused(config).startswith("the model folder lacks weights (*.safetensors)")


def test_a_hub_name_without_hub_and_cache_is_refused(config, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    config.actor_rollout_ref.model.path = "nobody/no-such-model"
    assert "is not in the local cache, and the hub is switched off" in refused(config)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    assert model.find_model(config) is None


def test_a_tokenizer_without_chat_template_is_refused(config, tiny_model, tmp_path):
    import shutil

    folder = tmp_path / "base"
    shutil.copytree(tiny_model, folder)
    (folder / "chat_template.jinja").unlink()
    config.actor_rollout_ref.model.path = str(folder)
    assert refused(config).startswith("the tokenizer has no chat template, and the prompts are chats")
    config.actor_rollout_ref.model.custom_chat_template = TEMPLATE
    run(config)


def test_parameters_are_counted_from_headers(tiny_model):
    assert model.count_parameters(tiny_model) == 1100


# --- data: case missing-column ---


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (rows(prompt=None), ["lacks the column 'prompt'", "columns data_source, reward_model", "data.prompt_key"]),
        (
            rows(prompt="2+2?"),
            ["'prompt' does not hold chats", "str: '2+2?'", "df['prompt'].map(lambda text: [{'role'"],
        ),
        (rows(reward_model=None), ["lacks the column 'reward_model'", "'ground_truth': '42'"]),
        (rows(data_source=None), ["lacks the column 'data_source'", "names the task"]),
        (rows(reward_model={"style": "rule"}), ["'reward_model' has no ground_truth", "dict ['style']"]),
        (rows(prompt=chat(role="system")), ["the chat template raises", "row 0, roles ['system']", "no system role"]),
        (rows(prompt=[{"text": "hi"}]), ["'prompt' does not hold chats"]),
    ],
)
def test_a_data_file_with_a_fault_is_named_with_column_and_fix(config, tmp_path, content, said):
    path = write(tmp_path / "bad.parquet", content)
    config.data.train_files = path
    text = refused(config)
    assert path in text
    assert [part for part in said if part not in text] == []
    config.data.train_files, config.data.val_files = config.data.val_files, [path]
    assert path in refused(config)


def test_an_empty_a_missing_and_a_damaged_file_are_refused(config, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "none.parquet"
    schema = pa.Table.from_pylist(rows()).schema
    pq.write_table(schema.empty_table(), path)
    config.data.train_files = str(path)
    assert refused(config).startswith("the data file has no rows")
    path.write_bytes(b"PAR1 and no more")
    assert refused(config).startswith("the data file is damaged")
    config.data.train_files = str(tmp_path / "nine.parquet")
    assert "holds none.parquet, train.parquet" in refused(config)
    config.data.train_files = str(tmp_path / "train.csv")
    (tmp_path / "train.csv").write_text("a")
    assert "legal: .parquet, .json, .jsonl" in refused(config)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_text_files_are_checked_by_their_first_row(config, tmp_path, name):
    path = tmp_path / name
    content = rows(reward_model=None)
    path.write_text("\n".join(map(json.dumps, content)) if name.endswith("l") else json.dumps(content, indent=1))
    config.data.train_files = str(path)
    assert "lacks the column 'reward_model'" in refused(config)


def test_fewer_rows_than_a_batch_is_refused(config):
    config.data.train_batch_size = 5
    assert "set data.train_batch_size to at most 4" in refused(config)


def test_columns_that_only_verls_managers_read_may_be_missing_for_others(config, tmp_path):
    config.data.train_files = write(tmp_path / "own.parquet", rows(reward_model=None, data_source=None))
    refused(config)
    for key, value in (
        ("reward.reward_manager.source", "importlib"),
        ("actor_rollout_ref.rollout.agent.agent_loop_config_path", "loops.yaml"),
        ("reward.reward_model.enable", True),
    ):
        changed = OmegaConf.create(OmegaConf.to_container(config))
        OmegaConf.update(changed, key, value)
        data.check_data(changed, None, Settings())


def test_warn_and_off_let_the_run_go_on(config, tmp_path, caplog):
    config.data.train_files = write(tmp_path / "bad.parquet", rows(prompt="text"))
    assert "or: fl.checks.data=warn runs all the same" in refused(config)
    config.fl.checks.data = "off"
    run(config)
    assert caplog.records == []
    config.fl.checks.data = "warn"
    run(config)
    assert "does not hold chats" in caplog.text


# --- reward ---


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def grade(**kw): return 1\n", "has no function 'compute_score'.*it defines grade"),
        ("import no_such_package\n", "can't be imported.*No module named 'no_such_package'"),
        ("def broken(:\n", "can't be imported.*SyntaxError"),
        ("import os; os._exit(5)\n", "exit status 5, with no message"),
        ("while True: pass\n", "did not end within 2 s"),
    ],
)
def test_a_reward_file_that_can_not_work_is_refused(config, tmp_path, monkeypatch, code, said):
    import re

    monkeypatch.setattr(reward, "_LIMIT_S", 2.0 if "while" in code else 60.0)
    path = tmp_path / "my_reward.py"
    path.write_text(code)
    config.reward.custom_reward_function.path = str(path)
    assert re.search(said, refused(config), re.DOTALL)


def test_a_reward_file_that_is_not_there_is_refused_and_a_good_one_passes(config, tmp_path):
    path = tmp_path / "my_reward.py"
    config.reward.custom_reward_function.path = str(path)
    assert refused(config).startswith("the reward function's file does not exist")
    path.write_text("print('hello')\ndef compute_score(**kw): return 1\n")
    run(config)


# --- engine ---


def test_fsdp_becomes_fsdp2_with_one_warning_where_the_platform_lacks_it(config, caplog):
    config.actor_rollout_ref.actor.strategy = config.critic.strategy = "fsdp"
    check(config, use_reference=False, use_critic=True)
    assert config.actor_rollout_ref.actor.strategy == config.critic.strategy == "fsdp2"
    assert len(caplog.records) == 1
    assert "actor_rollout_ref.actor, critic.strategy=fsdp2 instead of fsdp" in caplog.text


def test_an_asynchronous_fsdp_checkpoint_becomes_synchronous(config, caplog):
    config.actor_rollout_ref.actor.checkpoint.async_save = True
    run(config)
    assert config.actor_rollout_ref.actor.checkpoint.async_save is False
    assert "FSDP saves synchronously" in caplog.text


def test_on_a_stock_platform_nothing_is_mapped(config, monkeypatch):
    monkeypatch.setattr(_verl, "current_platform", lambda: object())
    config.actor_rollout_ref.actor.strategy = "fsdp"
    config.actor_rollout_ref.rollout.name = "vllm"
    del config["fl"]
    engine.choose_engines(config, use_reference=False, use_critic=False)
    assert config.actor_rollout_ref.actor.strategy == "fsdp"


def test_a_rollout_engine_that_is_not_installed_is_refused(config, monkeypatch):
    monkeypatch.setattr(engine, "find_spec", lambda name: None)
    config.actor_rollout_ref.rollout.name = "vllm"
    assert "the rollout engine 'vllm' is not installed" in refused(config)


# --- ray: case cpu-shortage ---


def test_the_demand_counts_every_pool(config):
    assert cluster.demand(config).cpus == 1 + 1 + 3 + 2
    config.trainer.n_gpus_per_node = 2
    config.transfer_queue.backend.SimpleStorage.num_data_storage_units = 8
    config.trainer.v1.trainer_mode = "separate_async"
    config.actor_rollout_ref.rollout.update({"nnodes": 1, "n_gpus_per_node": 3})
    config.reward.reward_model.update({"enable_resource_pool": True, "nnodes": 1, "n_gpus_per_node": 1})
    need = cluster.demand(config)
    assert need.cpus == (1 + 8) + 3 * 2 + 2 * 3 + 3 + 2
    assert need.devices == 2 + 3 + 1
    run(config)
    assert config.ray_kwargs.ray_init.resources.fl_cpu == 6


def test_too_few_cpus_are_refused_with_the_number_to_set(config):
    config.ray_kwargs.ray_init.num_cpus = 4
    text = refused(config)
    assert "the run needs 7: 2 for the TransferQueue, 3 for trainer workers, 2 spare" in text
    assert "set ray_kwargs.ray_init.num_cpus=7" in text
    config.ray_kwargs.ray_init.num_cpus = 7
    config.ray_kwargs.ray_init.resources = {"fl_cpu": 0.5}
    assert "too few slots of 'fl_cpu'" in refused(config)


def test_a_running_clusters_address_takes_our_keys_out(config, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    run(config)
    assert set(config.ray_kwargs.ray_init) == {"runtime_env"}


def test_a_cluster_with_too_few_cpus_is_refused_before_anything_waits(config, monkeypatch):
    import ray

    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.0})
    monkeypatch.setattr(
        ray, "nodes", lambda: [{"Alive": True, "NodeManagerAddress": "a", "NodeID": "1", "Resources": {}}]
    )
    with pytest.raises(ValueError, match="too few logical CPUs.*\n  asked: 7 CPUs.*\n  found: 2 CPUs in 1 nodes"):
        cluster.on_cluster(config)


def test_the_transfer_queue_does_not_wait_for_cpus_that_are_not_there(config, monkeypatch):
    import ray
    import transfer_queue

    node = {"Alive": True, "NodeManagerAddress": "10.0.0.1", "NodeID": "abcdef01", "Resources": {"CPU": 1.0}}
    monkeypatch.setattr(ray, "nodes", lambda: [node])
    with pytest.raises(ValueError, match="can never hold the TransferQueue"):
        transfer_queue.init(config.transfer_queue)


# --- memory and disk ---


def free_memory(monkeypatch, num_bytes):
    module = type(_verl.current_platform().device_module)
    monkeypatch.setattr(module, "mem_get_info", lambda self, device=None: (num_bytes, num_bytes))


def test_a_model_that_does_not_fit_is_refused_with_a_table(config, monkeypatch):
    free_memory(monkeypatch, 10**9)
    text = refused(config, RuntimeError)
    assert text.startswith("the run needs about 2.")
    assert "1,100 parameters" in text and "rollout (1 x 2 bytes)" in text and "1.0 GB are free" in text
    config.fl.checks.memory = "off"
    run(config)


def test_the_parts_of_memory_follow_the_run(config, tiny_model):
    parts = capacity.memory_parts(config, tiny_model, use_reference=True, use_critic=True)
    assert parts["parameters"] == parts["gradients"] == parts["reference"] == 4400
    assert parts["optimizer (two moments)"] == 8800
    assert parts["critic with gradients and optimizer"] == 16 * 1100
    assert parts["logits of one micro-batch"] == 2 * 4 * 4096 * 100
    config.actor_rollout_ref.model.lora_rank = 8
    lora = capacity.memory_parts(config, tiny_model, use_reference=True, use_critic=False)
    assert lora["gradients"] == lora["optimizer (two moments)"] == 0 and "reference" not in lora


def test_a_disk_without_room_is_refused_and_a_small_one_is_a_warning(config, monkeypatch, caplog):
    config.trainer.save_freq = 1
    monkeypatch.setattr(capacity, "free_bytes", lambda folder: 12 * 1100 - 1)
    assert refused(config, RuntimeError).startswith("the disk holds less than one checkpoint")
    monkeypatch.setattr(capacity, "free_bytes", lambda folder: 12 * 1100)
    run(config)
    assert "the disk holds few checkpoints" in caplog.text
    config.trainer.save_freq = -1
    monkeypatch.setattr(capacity, "free_bytes", lambda folder: 0)
    run(config)


def test_a_checkpoint_folder_that_can_not_be_written_is_refused(config, tmp_path, monkeypatch):
    config.trainer.save_freq = 1
    (tmp_path / "checkpoints").write_text("a file")
    assert "checkpoints is a file" in refused(config, RuntimeError)
    (tmp_path / "checkpoints").unlink()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    assert f"{tmp_path} is not writable for this user" in refused(config, RuntimeError)
