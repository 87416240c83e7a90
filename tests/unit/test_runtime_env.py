"""What reaches a worker's environment, and what never does (plugin-in-workers, leaked-mask)."""

import pytest

MASKS = [
    "CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "MUSA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES", "HABANA_VISIBLE_MODULES",
]  # fmt: skip


@pytest.fixture
def build(monkeypatch):
    from verl.trainer import constants_ppo

    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    monkeypatch.setattr("sys.argv", ["prog"])
    return lambda: constants_ppo.get_ppo_ray_runtime_env(None)["env_vars"]


def test_an_explicit_platform_is_passed_on_as_the_drivers_choice(monkeypatch, build):
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    env = build()
    assert env["VERL_FL_DRIVER_PLATFORM"] == "cpu" and "VERL_PLATFORM" not in env


def test_a_detected_platform_is_not_forced_on_anybody(build):
    assert "VERL_FL_DRIVER_PLATFORM" not in build()


def test_no_device_mask_is_forwarded(monkeypatch, build):
    from verl.trainer import constants_ppo

    leaking = {**constants_ppo.PPO_RAY_RUNTIME_ENV["env_vars"], **dict.fromkeys(MASKS, "0")}
    leaking["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
    monkeypatch.setitem(constants_ppo.PPO_RAY_RUNTIME_ENV, "env_vars", leaking)
    env = build()
    assert not set(MASKS) & set(env)
    assert env["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] == "1"


def test_our_own_variables_and_the_engine_choice_travel(monkeypatch, build):
    monkeypatch.setenv("VERL_FL_NUM_THREADS", "3")
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "flagos")
    env = build()
    assert (env["VERL_FL_NUM_THREADS"], env["VERL_ENGINE_VENDOR"]) == ("3", "flagos")
