"""A worker on a chip that verl's code does not know: its device, verl's flags, its engine, its tools."""

import logging
import os
from types import SimpleNamespace

import pytest
import torch

from verl_fl.platform.base import Platform, Probe


class _Module:
    """A device module that records what is selected."""

    def __init__(self, count=4):
        self.count, self.selected, self.waited = count, [], 0

    def is_available(self):
        return self.count > 0

    def device_count(self):
        return self.count

    def set_device(self, index):
        self.selected.append(index)

    def current_device(self):
        return self.selected[-1] if self.selected else 0

    def synchronize(self):
        self.waited += 1


class SimChip(Platform):
    """Fine, but unknown to verl and to Ray."""

    name = device_name = "simchip"
    vendor_name = "acme"
    collective = "gloo"
    visible_devices = "SIMCHIP_VISIBLE_DEVICES"
    ray_resource = "SIMCHIP"
    device_module = None

    @classmethod
    def probe(cls):
        return Probe(found=True, reason="test")


@pytest.fixture
def chip(monkeypatch, fresh_platform):
    """Make this process's platform one of the test's, with the given differences."""
    import verl  # noqa: F401  loads the plugin
    from verl.plugin.platform import PlatformBase

    from verl_fl.platform.bridge import to_verl

    for name in ("LOCAL_RANK", "RANK", "RAY_LOCAL_WORLD_SIZE", "RAY_custom_unit_instance_resources"):
        monkeypatch.delenv(name, raising=False)

    def make(count=4, **differences):
        platform_cls = type("Chip", (SimChip,), {"device_module": _Module(count), **differences})
        platform = to_verl(platform_cls, PlatformBase)()
        monkeypatch.setattr(fresh_platform, "_current_platform", platform)
        return platform

    return make


@pytest.fixture
def setup(monkeypatch):
    """Set up a worker under a mask, where Ray reports these ids or has these resources; its LOCAL_RANK afterwards."""
    import ray
    from ray._private import worker
    from verl.single_controller.base.worker import Worker

    def run(platform, mask=None, reported=(), held=None, **env):
        for name, value in {platform.visible_devices: mask, **env, "LOCAL_RANK": None}.items():
            monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
        context = SimpleNamespace(get_accelerator_ids=lambda: {"GPU": list(reported)})
        monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
        core = SimpleNamespace(resource_ids=lambda: held or {})
        monkeypatch.setattr(worker.global_worker, "core_worker", core, raising=False)
        monkeypatch.setenv("LOCAL_RANK", "left by nobody")  # so that monkeypatch takes back what the worker sets
        Worker._setup_env_cuda_visible_devices(None)
        return os.environ["LOCAL_RANK"]

    return run


NOT_MASKED_BY_RAY = {"RAY_EXPERIMENTAL_NOSET_SIMCHIP_VISIBLE_DEVICES": "1"}
UNITS = {"RAY_custom_unit_instance_resources": "NPU,SIMCHIP"}


@pytest.mark.parametrize(
    ("mask", "reported", "index"),
    [("2,3", "3", 1), ("3,2", "3", 0), (None, "1", 1), ("0,1,2,3", "2", 2), ("5", "5", 0), (" 2 , 3 ", "3", 1)],
)
def test_a_reported_id_becomes_its_position_in_the_mask(chip, setup, mask, reported, index):
    platform = chip(ray_resource="GPU")
    assert setup(platform, mask, [reported], **NOT_MASKED_BY_RAY) == str(index)
    assert platform.device_module.selected == [index]


@pytest.mark.parametrize(("mask", "reported"), [("2,3", "1"), ("", "0")])
def test_an_id_that_the_mask_hides_is_an_error_that_says_so(chip, setup, mask, reported):
    platform = chip(ray_resource="GPU")
    with pytest.raises(ValueError, match=f"device {reported} was assigned") as error:
        setup(platform, mask, [reported], **NOT_MASKED_BY_RAY)
    assert "asked: " in str(error.value) and "SIMCHIP_VISIBLE_DEVICES=" in str(error.value)
    assert "do: start Ray" in str(error.value)
    assert platform.device_module.selected == []


def test_where_ray_masks_by_itself_verl_goes_on_as_it_does(chip, setup):
    platform = chip(ray_resource="GPU")
    assert setup(platform, "3", ["3"]) == "left by nobody"
    assert platform.device_module.selected == []


@pytest.mark.parametrize(
    ("held", "index"),
    [
        ({"SIMCHIP": [(2, 0.5)]}, 2),
        ({"bundle_group_ab": [(0, 0.1)], "SIMCHIP_group_0_ab": [(0, 0.5)], "SIMCHIP_group_ab": [(3, 0.5)]}, 3),
    ],
    ids=["alone", "in a placement group, as Ray 2.60 shows it"],
)
def test_a_custom_resource_gives_the_slot_that_ray_assigned(chip, setup, held, index):
    platform = chip()
    assert setup(platform, held=held, **UNITS) == str(index)
    assert platform.device_module.selected == [index]


def test_without_ids_the_rank_on_the_node_is_taken_with_a_warning(chip, setup, caplog):
    platform = chip()
    with caplog.at_level(logging.WARNING, "verl_fl.platform"):
        assert setup(platform, held={"SIMCHIP": [(0, 0.5)]}, RANK="5", RAY_LOCAL_WORLD_SIZE="4") == "1"
    assert platform.device_module.selected == [1]
    assert "RAY_custom_unit_instance_resources" in caplog.text and "SIMCHIP" in caplog.text


@pytest.mark.parametrize("count", [0, 1])
def test_a_rank_without_a_device_is_an_error_with_the_count(chip, setup, count):
    platform = chip(count)
    with pytest.raises(ValueError, match="is no device of this process") as error:
        setup(platform, RANK="1", RAY_LOCAL_WORLD_SIZE="2")
    assert f"{count} devices" in str(error.value) and "SIMCHIP" in str(error.value)


def test_another_vendors_mask_does_not_matter(chip, setup):
    platform = chip(mask_aliases=())
    assert setup(platform, held={"SIMCHIP": [(1, 1.0)]}, CUDA_VISIBLE_DEVICES="7", **UNITS) == "1"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "7"


def test_ray_is_told_nothing_but_verl_finds_the_device_under_its_resource(chip, monkeypatch):
    from ray.runtime_context import RuntimeContext

    platform = chip()
    platform.set_device(1)
    monkeypatch.setenv("SIMCHIP_VISIBLE_DEVICES", "2,3")
    names = "ray._private.accelerators.get_all_accelerator_resource_names"
    monkeypatch.setattr(names, lambda: {"GPU"})
    worker = SimpleNamespace(
        check_connected=lambda: None, get_accelerator_ids_for_accelerator_resource=lambda *args: ["0"]
    )
    ids = RuntimeContext.get_accelerator_ids(SimpleNamespace(worker=worker))
    assert ids["SIMCHIP"] == ["3"] and list(ids) == ["GPU"]
    with pytest.raises(KeyError):
        ids["OTHER"]


def test_the_variables_that_keep_ray_from_masking_include_the_platforms(chip):
    from verl.utils.ray_utils import ray_noset_visible_devices

    chip()
    assert ray_noset_visible_devices({"RAY_EXPERIMENTAL_NOSET_SIMCHIP_VISIBLE_DEVICES": "1"})
    assert ray_noset_visible_devices({"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"})
    assert not ray_noset_visible_devices({})


MASKS = [
    "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "MUSA_VISIBLE_DEVICES",
    "ASCEND_RT_VISIBLE_DEVICES", "ASCEND_VISIBLE_DEVICES", "MLU_VISIBLE_DEVICES", "ZE_AFFINITY_MASK",
    "ONEAPI_DEVICE_SELECTOR", "SIMX_VISIBLE_DEVICES", "CHIP_MASK_OF_ITS_OWN",
]  # fmt: skip


@pytest.mark.parametrize("where", ["verl's defaults", "the user's config"])
def test_no_vendors_mask_is_forwarded(chip, monkeypatch, caplog, where):
    """leaked-mask: what a runtime environment carries, every worker of every node would get."""
    from omegaconf import OmegaConf
    from verl.plugin.platform import PlatformBase, PlatformRegistry
    from verl.trainer import constants_ppo

    from verl_fl.platform.bridge import to_verl

    own = to_verl(type("Own", (SimChip,), {"visible_devices": "CHIP_MASK_OF_ITS_OWN"}), PlatformBase)
    monkeypatch.setattr(PlatformRegistry, "_platforms", {**PlatformRegistry._platforms, "simchip": own})
    monkeypatch.setenv("VERL_PLATFORM", "simchip")
    leaking = {**dict.fromkeys(MASKS, "0"), "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1", "MY_SETTING": "2"}
    config = OmegaConf.create({"ray_kwargs": {"ray_init": {"runtime_env": {"env_vars": {}}}}})
    if where == "the user's config":
        config.ray_kwargs.ray_init.runtime_env.env_vars = leaking
    else:
        monkeypatch.setitem(constants_ppo.PPO_RAY_RUNTIME_ENV, "env_vars", leaking)
    OmegaConf.set_struct(config, True)
    chip()
    with caplog.at_level(logging.WARNING, "verl_fl.platform"):
        forwarded = constants_ppo.get_ppo_ray_runtime_env(config)["env_vars"]
    merged = {**forwarded, **config.ray_kwargs.ray_init.runtime_env.env_vars}
    assert not set(MASKS) & set(merged)
    assert merged["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] == "1" and merged["MY_SETTING"] == "2"
    assert all(name in caplog.text for name in MASKS)


# --- flags ---


def test_flags_follow_the_platform_and_not_a_shim(chip, monkeypatch):
    """shim-makes-cuda: torch.cuda answers for another vendor's chip."""
    from verl.utils import device

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "npu", SimpleNamespace(is_available=lambda: True), raising=False)
    chip()
    flags = device.is_cuda_available, device.is_npu_available, device.is_torch_npu_available(check_device=False)
    assert [bool(flag) for flag in flags] == [False, False, False]
    assert not device.is_torch_npu_available()
    assert repr(device.is_cuda_available) == "<verl-fl: cuda is not available>"
    chip(device_name="npu")
    assert [bool(flag) for flag in flags[:2]] == [False, True] and device.is_torch_npu_available()
    chip(device_name="cuda")
    assert [bool(flag) for flag in flags[:2]] == [True, False]
    chip(device_name="cuda", count=0)
    assert not device.is_cuda_available  # a process that sees no device


def test_asking_a_flag_does_not_decide_the_platform(fresh_platform, monkeypatch):
    from verl.utils import device

    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    assert not device.is_cuda_available and not device.is_npu_available
    assert fresh_platform._current_platform is None


def test_a_checkpoint_leaves_every_accelerator_for_the_host(chip, monkeypatch, fresh_platform):
    from verl.utils.checkpoint import fsdp_checkpoint_manager

    chip()
    assert fsdp_checkpoint_manager.is_cuda_available
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    monkeypatch.setattr(fresh_platform, "_current_platform", None)
    assert not fsdp_checkpoint_manager.is_cuda_available


def test_snapshots_that_are_not_pinned_get_a_bool(chip):
    from verl.utils import device
    from verl.workers.engine.utils import prime_delta_snapshots

    chip()
    weight, snapshots = torch.ones(2), {}
    prime_delta_snapshots(iter([("w", weight, None)]), snapshots, pin=device.is_cuda_available and True)
    assert torch.equal(snapshots["w"], weight)


def test_flash_attentions_loss_needs_the_platforms_support(chip, monkeypatch):
    from verl.utils.experimental import torch_functional

    from verl_fl.patches import flags

    chip(features={"flash_attention_2": (False, "no kernel")})
    assert not flags.fused_cross_entropy(True)
    assert not torch_functional._FLASH_ATTN_CROSS_ENTROPY_AVAILABLE
    chip(features={"flash_attention_2": (True, "")})
    assert flags.fused_cross_entropy(True) and not flags.fused_cross_entropy(False)


# --- tools ---


def test_numa_affinity_is_asked_of_nvml_only_for_its_own_devices(chip, capsys):
    from verl.utils.distributed import set_numa_affinity

    chip()
    set_numa_affinity()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("device", "supported", "used"),
    [("xpu", {"CPU", "XPU"}, "xpu"), ("xpu", {"CPU"}, None), ("simchip", {"CPU", "PrivateUse1"}, "simchip"),
     ("cuda", {"CPU", "CUDA"}, "cuda"), ("mps", {"CPU"}, None)],
)  # fmt: skip
def test_the_profiler_watches_the_platforms_device(chip, monkeypatch, tmp_path, device, supported, used):
    from torch.profiler import ProfilerActivity
    from verl.utils.profiler.torch_profile import get_torch_profiler

    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: "simchip")
    activities = {getattr(ProfilerActivity, name) for name in supported}
    monkeypatch.setattr("torch.profiler.supported_activities", lambda: activities)
    chip(device_name=device)
    profiler = get_torch_profiler([], str(tmp_path))
    assert profiler.use_device == used and profiler.activities == activities


def test_a_trace_of_a_device_without_activity_has_the_cpus(chip, tmp_path):
    from verl.utils.profiler.torch_profile import get_torch_profiler

    chip()
    profiler = get_torch_profiler(["cuda"], str(tmp_path))
    with profiler:
        torch.ones(3) + 1
    assert [path.suffix for path in tmp_path.iterdir()] == [".gz"]


def test_a_range_of_the_fused_loss_goes_to_the_platform(chip):
    import contextlib

    names = []
    chip(nvtx_range=lambda self, msg: names.append(msg) or contextlib.nullcontext())
    from verl.utils.kernel import linear_cross_entropy  # noqa: F401  what uses it

    with torch.cuda.nvtx.range("LinearCrossEntropy-forward"):
        pass
    assert names == ["LinearCrossEntropy-forward"]


def test_a_device_that_can_not_say_its_memory_does_not_end_the_run(chip):
    from verl.utils.profiler.performance import _get_current_mem_info

    platform = chip()
    assert _get_current_mem_info() == ("0.00",) * 4
    for name, answer in (("memory_allocated", 1 << 30), ("memory_reserved", 2 << 30)):
        setattr(platform.device_module, name, lambda answer=answer: answer)
    assert _get_current_mem_info() == ("0.00",) * 4  # two of the three are not enough
    platform.device_module.mem_get_info = lambda: (1 << 30, 4 << 30)
    assert _get_current_mem_info(precision=1) == ("1.0", "2.0", "3.0", "4.0")


@pytest.mark.parametrize(("started", "waited"), [(True, 1), (False, 0)])
def test_a_copy_to_the_host_waits_for_the_platforms_device(chip, monkeypatch, started, waited):
    """Under a shim tensordict would ask torch.cuda, which never started, and wait for nothing."""
    from tensordict import TensorDict

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    platform = chip()
    platform.device_module.is_initialized = lambda: started
    TensorDict({"a": torch.ones(2)}, batch_size=[2])._sync_all()
    assert platform.device_module.waited == waited


def test_a_transfer_engines_buffer_is_on_the_platforms_device(chip, monkeypatch):
    from verl.checkpoint_engine.base import CheckpointEngineRegistry

    class Engine:
        def __init__(self, bucket_size, device="cuda", is_master=False):
            self.device = device

    class Other:
        def __init__(self, bucket_size, device="auto"):
            self.device = device

    monkeypatch.setitem(CheckpointEngineRegistry._registry, "test", Engine)
    monkeypatch.setitem(CheckpointEngineRegistry._registry, "other", Other)
    chip()
    new = CheckpointEngineRegistry.new
    assert new("test", bucket_size=1).device == "simchip"
    assert new("test", bucket_size=1, device="cpu").device == "cpu" and new("test", 1, "cpu").device == "cpu"
    assert new("other", bucket_size=1).device == "auto"


def test_sequence_parallelism_without_flash_attention_is_refused(chip):
    from verl.models.transformers.monkey_patch import apply_monkey_patch

    chip(features={"flash_attention_2": (False, "no kernel for it")})
    model = SimpleNamespace(config=SimpleNamespace(_attn_implementation="sdpa"))
    with pytest.raises(ValueError, match="sequence parallelism works with FlashAttention only") as error:
        apply_monkey_patch(model, ulysses_sp_size=2)
    assert "no kernel for it" in str(error.value) and "ulysses_sequence_parallel_size=1" in str(error.value)


# --- engines ---


@pytest.fixture
def engines(monkeypatch):
    """verl's engine registry, as it is now, to register in and to be put back."""
    import verl.workers.engine  # noqa: F401
    from verl.workers.engine.base import EngineRegistry

    tables = EngineRegistry._engines
    copy = {model: {backend: dict(row) for backend, row in rows.items()} for model, rows in tables.items()}
    monkeypatch.setattr(EngineRegistry, "_engines", copy)
    return EngineRegistry


def test_every_platform_of_the_registry_finds_an_engine(chip, engines, monkeypatch):
    from verl.plugin.platform import PlatformBase, PlatformRegistry

    from verl_fl.engine import fsdp
    from verl_fl.platform.bridge import to_verl

    monkeypatch.setattr(PlatformRegistry, "_platforms", dict(PlatformRegistry._platforms))
    PlatformRegistry.register(platform="simchip")(to_verl(SimChip, PlatformBase))
    fsdp.register()
    before = {model: {backend: dict(row) for backend, row in rows.items()} for model, rows in engines._engines.items()}
    fsdp.register()
    assert engines._engines == before
    pairs = [("cpu", "cpu"), ("musa", "mthreads"), ("xpu", "intel"), ("mlu", "cambricon"), ("cuda", "metax")]
    for device, vendor in [*pairs, ("simchip", "acme")]:
        chip(device_name=device, vendor_name=vendor)
        for model in ("language_model", "value_model"):
            for backend in ("fsdp", "fsdp2"):
                assert engines.get_engine_cls(model, backend).__module__ == "verl_fl.engine.fsdp", (device, vendor)
    for device, vendor in [("cuda", "nvidia"), ("cuda", "amd"), ("npu", "huawei")]:
        chip(device_name=device, vendor_name=vendor)
        assert engines.get_engine_cls("language_model", "fsdp").__module__.startswith("verl.workers"), (device, vendor)


def test_the_users_engine_choice_still_wins(chip, engines, monkeypatch):
    chip()
    monkeypatch.setenv("VERL_ENGINE_DEVICE", "cuda")
    assert engines.get_engine_cls("language_model", "fsdp2").__module__.startswith("verl.workers")
    monkeypatch.setenv("VERL_ENGINE_DEVICE", "cpu")
    assert engines.get_engine_cls("language_model", "fsdp2").__module__ == "verl_fl.engine.fsdp"
