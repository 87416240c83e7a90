"""What a user may ask of quickstart, and what each mistake is answered with."""

from pathlib import Path

import pytest

from verl_fl.cli import command, inputs, models, options, resume
from verl_fl.cli._exit import UsageError

REWARD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"


def resolve(tmp_path, *overrides, **asked):
    return options.resolve(asked, list(overrides), tmp_path / "run")


def parquet(path: Path, rows=8, columns=("prompt", "data_source", "reward_model")) -> Path:
    import pyarrow
    import pyarrow.parquet

    values = {
        "prompt": [{"role": "user", "content": "hello"}],
        "data_source": "mine",
        "reward_model": {"ground_truth": "x"},
    }
    table = pyarrow.Table.from_pylist([{name: values[name] for name in columns}] * rows)
    pyarrow.parquet.write_table(table, path)
    return path


def assert_clear(error: UsageError, *words: str) -> None:
    text = str(error)
    assert error.exit_code == 2
    assert "\n  asked: " in text and "\n  do: " in text, text
    assert "Traceback" not in text
    for word in words:
        assert word in text, f"{word!r} is not in: {text}"


def test_no_option_at_all_is_the_toy_run_of_float32_and_seed_0(tmp_path):
    chosen = resolve(tmp_path)
    assert chosen.is_toy
    assert (chosen.seed, chosen.dtype, chosen.algorithm, chosen.reward) == (0, "float32", "grpo", None)
    assert chosen.batch % chosen.mini_batch == 0


def test_an_own_model_gets_a_pretrained_models_defaults(tmp_path):
    toy, own = resolve(tmp_path), resolve(tmp_path, model="some/model")
    assert own.lr < toy.lr / 10
    assert own.dtype == "bfloat16"
    assert own.mini_batch == own.batch


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"steps": 0}, ("--steps 0", "1 or more")),
        ({"batch": -1}, ("--batch -1",)),
        ({"response_length": 0}, ("--response-length 0",)),
        ({"save_every": -1}, ("--save-every -1", "0 or more")),
        ({"lr": 0.0}, ("--lr 0", "above 0")),
        ({"dtype": "float16"}, ("float16", "float32, bfloat16")),
        ({"algorithm": "dpo"}, ("dpo", "grpo, rloo, reinforce_plus_plus, ppo")),
        ({"samples": 1}, ("--samples 1", "2 or more")),
        ({"train": "x.parquet"}, ("--train without --reward", "--reward")),
        ({"reward": "x.py"}, ("--reward without --train",)),
        ({"val": "x.parquet"}, ("--val without --train",)),
    ],
)
def test_an_option_out_of_bounds_is_a_usage_error_that_names_the_legal_values(tmp_path, asked, words):
    with pytest.raises(UsageError) as error:
        resolve(tmp_path, **asked)
    assert_clear(error.value, *words)


def test_one_sample_is_enough_for_an_algorithm_that_does_not_compare_samples(tmp_path):
    assert resolve(tmp_path, samples=1, algorithm="ppo").samples == 1


@pytest.mark.parametrize("override", ["nonsense", "-x=1", "=3", "a b=1"])
def test_what_hydra_could_not_read_is_refused(tmp_path, override):
    with pytest.raises(UsageError) as error:
        resolve(tmp_path, override)
    assert_clear(error.value, override, "key=value")


@pytest.mark.parametrize("override", sorted(f"{key}=1" for key in options.OURS) + ["++trainer.logger=[console]"])
def test_an_override_that_would_blind_quickstart_is_refused(tmp_path, override):
    with pytest.raises(UsageError) as error:
        resolve(tmp_path, override)
    assert_clear(error.value, "quickstart sets")


def test_another_platform_is_refused_and_cpu_is_not_repeated(tmp_path):
    assert resolve(tmp_path, "+fl=cpu", "a.b=1").overrides == ("a.b=1",)
    with pytest.raises(UsageError, match="quickstart runs on the CPU"):
        resolve(tmp_path, "+fl=elsewhere")


def test_a_run_folder_with_files_in_it_is_refused(tmp_path):
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    with pytest.raises(UsageError) as error:
        resolve(tmp_path, out=tmp_path / "used")
    assert_clear(error.value, "files in it")


def test_the_users_overrides_come_last_and_the_run_has_a_ray_of_its_own(tmp_path):
    chosen = resolve(tmp_path, "actor_rollout_ref.rollout.n=3")
    line = command.command(chosen, model="/m", train="/t", reward="/r", ray_dir="/tmp/x", resume=False)
    assert line[1:4] == ["-m", "verl.trainer.main_ppo", "+fl=cpu"]
    assert line[-1] == "actor_rollout_ref.rollout.n=3"
    assert "+ray_kwargs.ray_init._temp_dir=/tmp/x" in line
    assert "+ray_kwargs.ray_init.address=local" in line
    assert "trainer.resume_mode=disable" in line


def test_paths_with_what_hydras_grammar_uses_arrive_whole(tmp_path):
    from hydra.core.override_parser.overrides_parser import OverridesParser

    chosen = resolve(tmp_path, out=tmp_path / "a=b, {c} it's")
    line = command.overrides(chosen, model="/m o=d", train="/t,x", reward=None, ray_dir="/tmp/x")
    parsed = {each.key_or_group: each.value() for each in OverridesParser.create().parse_overrides(line)}
    assert str(parsed["actor_rollout_ref.model.path"]) == "/m o=d"
    assert str(parsed["data.train_files"]) == "/t,x"
    assert str(parsed["trainer.default_local_dir"]) == chosen.out + "/checkpoints"


def test_dtype_reaches_rollout_and_engines(tmp_path):
    line = command.overrides(resolve(tmp_path, dtype="fp32"), "/m", "/t", None, "/tmp/x")
    assert "actor_rollout_ref.rollout.dtype=float32" in line
    assert "+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32" in line


def test_ppo_gets_a_critic_of_the_same_model(tmp_path):
    line = command.overrides(resolve(tmp_path, algorithm="ppo"), "/m", "/t", None, "/tmp/x")
    assert "algorithm.adv_estimator=gae" in line
    assert "critic.model.path=/m" in line


def test_a_good_reward_file_passes_and_is_not_executed(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text(REWARD + "raise SystemExit('executed')\n")
    inputs.check_reward(path)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("reward.txt", REWARD, ("reward.txt", "FILE.py")),
        ("reward.py", None, ("no file",)),
        ("reward.py", "def score(x): pass\n", ("no compute_score", "found: score")),
        ("reward.py", "def compute_score(:\n", ("not valid Python", "line 1")),
        ("reward.py", "def compute_score(answer): pass\n", ("solution_str", "by name")),
    ],
)
def test_a_reward_file_that_verl_could_not_call_is_refused(tmp_path, name, text, words):
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError) as error:
        inputs.check_reward(path)
    assert_clear(error.value, *words)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: parquet(path / "t.parquet", columns=("prompt", "data_source")), ("lacks", "reward_model")),
        (lambda path: parquet(path / "t.parquet", rows=3), ("fewer rows", "found: 3 rows", "--batch 3")),
        (lambda path: path / "absent.parquet", ("no file",)),
        (lambda path: path / "t.csv", ("takes a parquet file",)),
    ],
)
def test_prompts_that_verl_could_not_read_are_refused(tmp_path, make, words):
    with pytest.raises(UsageError) as error:
        inputs.check_parquet(make(tmp_path), "--train", at_least=4)
    assert_clear(error.value, *words)


def test_a_file_that_only_calls_itself_parquet_is_refused(tmp_path):
    (tmp_path / "t.parquet").write_text("a,b\n1,2\n")
    with pytest.raises(UsageError) as error:
        inputs.check_parquet(tmp_path / "t.parquet", "--train", at_least=1)
    assert_clear(error.value, "can't be read as parquet")


def test_each_kind_of_model_is_told_apart(tmp_path):
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "chat_template.jinja").touch()
    (tmp_path / "m.gguf").write_bytes(b"GGUF\x03")
    assert inputs.model_kind(str(folder)) == "folder"
    assert inputs.model_kind(str(tmp_path / "m.gguf")) == "gguf"
    assert inputs.model_kind("owner/name") == "hub"


@pytest.mark.parametrize(
    ("files", "model", "words"),
    [
        ({}, "absent", ("no model at",)),
        ({}, "./owner/name", ("no model at",)),
        ({}, "absent.gguf", ("no model file",)),
        ({"m.gguf": "<html>"}, "m.gguf", ("not a GGUF file", "<htm")),
        ({"m/readme": ""}, "m", ("no config.json",)),
        ({"m/config.json": "{}"}, "m", ("no chat template", "no tokenizer_config.json")),
        ({"m/config.json": "{}", "m/tokenizer_config.json": "{}"}, "m", ("no chat template", "chat_template.jinja")),
        ({"m.bin": ""}, "m.bin", ("not a model",)),
    ],
)
def test_a_model_that_can_not_be_loaded_is_refused(tmp_path, monkeypatch, files, model, words):
    monkeypatch.chdir(tmp_path)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    with pytest.raises(UsageError) as error:
        inputs.model_kind(model)
    assert_clear(error.value, *words)


def test_a_hub_model_that_is_not_in_the_cache_is_refused_offline(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UsageError) as error:
        models.fetch(resolve(tmp_path, model="verl-fl-tests/absent"), lambda text: None)
    assert_clear(error.value, "HF_HUB_OFFLINE=1", "local folder")


def finished_run(tmp_path, step=10):
    chosen = resolve(tmp_path, "a.b=1", seed=4)
    out = Path(chosen.out)
    (out / "checkpoints" / f"global_step_{step}").mkdir(parents=True)
    (out / "checkpoints" / "latest_checkpointed_iteration.txt").write_text(str(step))
    resume.save(chosen, {"model": "/m", "train": "/t", "reward": None})
    return out, chosen


def test_a_resumed_run_keeps_its_options_and_may_get_more_steps(tmp_path):
    out, before = finished_run(tmp_path)
    chosen, prepared = resume.load(out, {"steps": 50, "seed": None}, ["c.d=2"])
    assert (chosen.steps, chosen.seed, chosen.overrides) == (50, 4, ("a.b=1", "c.d=2"))
    assert prepared["model"] == "/m"
    assert resume.load(out, {}, [])[0].steps == 50, "the folder remembers the change"


def test_what_can_not_be_resumed_is_said_in_advance(tmp_path):
    out, before = finished_run(tmp_path, step=before_steps(tmp_path))
    cases = [
        ({}, out, "is at step"),
        ({"seed": 1}, out, "keeps its own --seed"),
        ({}, tmp_path / "absent", "not a run folder"),
    ]
    for asked, folder, words in cases:
        with pytest.raises(UsageError) as error:
            resume.load(folder, asked, [])
        assert_clear(error.value, words)
    (out / "checkpoints" / "latest_checkpointed_iteration.txt").unlink()
    with pytest.raises(UsageError, match="no checkpoint"):
        resume.load(out, {}, [])


def before_steps(tmp_path):
    return resolve(tmp_path).steps
