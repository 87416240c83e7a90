"""Every vendor's file, against a stand-in of its package: what it calls, what it says, and how little it is."""

import inspect
import sys
import types
from pathlib import Path

import pytest
import stand_ins
import torch

from verl_fl.platform import evidence
from verl_fl.platform.base import FEATURES, Platform
from verl_fl.platform.bridge import to_verl
from verl_fl.platform.manager import platform_classes

VENDORS = {name: cls for name, cls in platform_classes().items() if name not in ("cpu", "generic")}
EXPECTED = {
    # name: device, vendor, collective, FlagCX, mask, Ray resource and options for two
    "cuda": ("cuda", "nvidia", "nccl", "nvidia", "CUDA_VISIBLE_DEVICES", "GPU", {"num_gpus": 2}),
    "metax": ("cuda", "metax", "nccl", "metax", "CUDA_VISIBLE_DEVICES", "GPU", {"num_gpus": 2}),
    "npu": ("npu", "huawei", "hccl", "ascend", "ASCEND_RT_VISIBLE_DEVICES", "NPU", {"resources": {"NPU": 2}}),
    "musa": ("musa", "mthreads", "mccl", "musa", "MUSA_VISIBLE_DEVICES", "MUSA", {"resources": {"MUSA": 2}}),
    "rocm": ("cuda", "amd", "nccl", "amd", "CUDA_VISIBLE_DEVICES", "GPU", {"num_gpus": 2}),
    "xpu": ("xpu", "intel", "xccl", "", "ZE_AFFINITY_MASK", "GPU", {"num_gpus": 2}),
    "mlu": ("mlu", "cambricon", "cncl", "cambricon", "MLU_VISIBLE_DEVICES", "MLU", {"resources": {"MLU": 2}}),
}


@pytest.fixture(params=VENDORS)
def vendor(request, monkeypatch):
    """``(platform as verl sees it, stand-in of its module)``; its SDK is installed and not a real one."""
    from verl.plugin.platform import PlatformBase, PlatformRegistry

    cls = VENDORS[request.param]
    for name in (cls.visible_devices, *cls.mask_aliases, "USE_FLAGCX"):
        monkeypatch.delenv(name, raising=False)
    module = stand_ins.device(f"torch.{cls.device_name}")
    monkeypatch.setattr(torch, cls.device_name, module, raising=False)
    if cls.sdk:
        monkeypatch.setitem(sys.modules, cls.sdk, types.ModuleType(cls.sdk))
    return to_verl(cls, PlatformBase, PlatformRegistry.get(cls.verl_name))(), module


def test_the_table_is_whole():
    assert list(EXPECTED) == list(VENDORS)


def test_it_states_its_names(vendor):
    platform, _ = vendor
    device, name, collective, flagcx, mask, resource, options = EXPECTED[platform.name]
    assert (platform.device_name, platform.vendor_name, platform.flagcx) == (device, name, flagcx)
    assert platform.communication_backend_name() == collective
    assert platform.process_group_backend() == f"cpu:gloo,{device}:{collective}"
    assert platform.visible_devices_envvar() == mask
    assert platform.ray_resource_name() == resource
    assert platform.ray_resource_options(2) == options
    assert all(variable.startswith("RAY_EXPERIMENTAL_NOSET_") for variable in platform.ray_noset_envvars())


def test_it_asks_its_own_module_and_nothing_else(vendor):
    platform, module = vendor
    assert platform.is_available() is True
    assert (platform.current_device(), platform.device_count()) == (1, 2)
    platform.set_device(1)
    platform.synchronize()
    platform.synchronize(1)
    platform.manual_seed(3)
    platform.manual_seed_all(4)
    platform.empty_cache()
    assert platform.get_device_capability(1) == (9, 0)
    assert platform.current_stream() == "the current stream"
    stream = platform.new_stream()
    with platform.stream(stream) as entered:
        assert entered is stream
    assert isinstance(platform.new_event(), module.Event)
    assert module.calls == [
        ("is_available",),
        ("current_device",),
        ("device_count",),
        ("set_device", 1),
        ("synchronize",),
        ("synchronize", 1),
        ("manual_seed", 3),
        ("manual_seed_all", 4),
        ("empty_cache",),
        ("get_device_capability", 1),
        ("current_stream",),
        ("stream", stream),
    ]


def test_an_allocator_without_settings_ignores_them_and_one_with_takes_them(vendor):
    platform, module = vendor
    platform.set_allocator_settings("expandable_segments:True")
    module.memory = stand_ins.memory(_set_allocator_settings=None)
    platform.set_allocator_settings("expandable_segments:True")
    assert module.memory.calls == [("_set_allocator_settings", "expandable_segments:True")]


def test_profiling_uses_what_the_vendor_has(vendor):
    platform, module = vendor
    if platform.cudart.__func__ is Platform.cudart:
        with platform.nvtx_range("step"):
            platform.profiler_start()
            platform.profiler_stop()
        assert platform.cudart() is None and module.calls == []
        return
    module.nvtx = stand_ins.device("nvtx", range=lambda message: __import__("contextlib").nullcontext())
    module.profiler = stand_ins.device("profiler", start=None, stop=None)
    module.cudart = lambda: "the runtime"
    with platform.nvtx_range("step"):
        platform.profiler_start()
        platform.profiler_stop()
    assert module.nvtx.calls == [("range", "step")]
    assert (module.profiler.calls, platform.cudart()) == ([("start",), ("stop",)], "the runtime")


def test_every_feature_is_answered_with_a_reason(vendor):
    platform, _ = vendor
    for feature in FEATURES:
        if feature != "ipc":  # verl's own class for one of them asks a tool that is not here
            works, reason = platform.supports(feature)
            assert isinstance(works, bool) and reason


def test_it_is_one_of_verls_with_all_that_verl_may_ask(vendor):
    from verl.plugin.platform import PlatformBase, PlatformRegistry

    platform, _ = vendor
    assert isinstance(platform, PlatformBase)
    assert platform.apply_model_patches("language_model") is None
    assert isinstance(platform.rollout_env_vars(), dict)
    assert platform.get_collective_module() is None, "cupy is not installed here"
    assert len({platform.get_device_uuid(0), platform.get_device_uuid(1)}) == 2
    stock = PlatformRegistry.get(platform.verl_name)
    if stock is not None:
        assert isinstance(platform, stock)
        assert type(platform).is_ipc_supported is stock.is_ipc_supported
        assert type(platform).rollout_env_vars is stock.rollout_env_vars


def test_a_sdk_that_does_not_load_is_said_in_four_parts(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    with pytest.raises(RuntimeError, match="torch can't use 'npu' devices here") as error:
        VENDORS["npu"]().device_count()
    assert "asked: platform npu" in str(error.value) and "do: install the torch_npu" in str(error.value)


def test_musas_streams_can_be_read_as_cudas(vendor):
    platform, _ = vendor
    if platform.name == "musa":
        assert platform.new_stream().cuda_stream == 7


@pytest.mark.parametrize("name", [*VENDORS, "generic"])
def test_a_vendors_file_is_at_most_sixty_lines(name):
    assert len(Path(inspect.getfile(platform_classes()[name])).read_text().splitlines()) <= 60


def test_importing_all_of_them_loads_no_torch_and_no_sdk():
    import subprocess

    code = (
        "import sys\nfrom verl_fl.platform.manager import detect, platform_classes\nplatform_classes(); detect()\n"
        "print([m for m in sys.modules if m.split('.')[0].startswith(('torch', 'verl.', 'ray', 'flagcx'))])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


# --- evidence: a machine made of files --------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Makes this machine one with these files and this torch."""

    def make(*files, cards=(), packages=(), **build):
        for file in files:
            path = tmp_path / file.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        for number, (vendor, kind) in enumerate(cards):
            folder = tmp_path / f"sys/bus/pci/devices/0000:0{number}:00.0"
            folder.mkdir(parents=True)
            (folder / "vendor").write_text(f"{vendor}\n")
            (folder / "class").write_text(f"{kind}\n")
        monkeypatch.setattr(evidence, "ROOT", tmp_path)
        torch_has = {"version": "2.9.0", "cuda": "", "hip": "", "xpu": "", **build}
        monkeypatch.setattr(evidence, "torch_build", lambda: torch_has)
        monkeypatch.setattr(evidence, "package", lambda name: name in packages)
        return {name: cls.probe() for name, cls in VENDORS.items()}

    return make


DRIVER = "/proc/driver/nvidia/version"


@pytest.mark.parametrize(
    ("files", "facts", "found"),
    [
        ((), {}, []),
        ((), {"cuda": "12.8"}, []),  # the default torch of a laptop proves nothing
        ((DRIVER,), {"cuda": "12.8"}, ["cuda"]),
        (("/dev/nvidia0", "/dev/nvidia1"), {"cuda": "12.8"}, ["cuda"]),
        ((DRIVER,), {}, []),
        ((), {"packages": ["torch_npu"]}, ["npu"]),
        ((), {"packages": ["torch_musa"]}, ["musa"]),
        ((), {"packages": ["torch_mlu"]}, ["mlu"]),
        ((), {"hip": "6.4", "version": "2.9.0+rocm6.4"}, ["rocm"]),
        ((), {"xpu": "20250000", "version": "2.9.0+xpu"}, ["xpu"]),
        (("/dev/mxcd", "/usr/bin/nvidia-smi"), {"cuda": "11.6", "version": "2.8.0+metax3.5.3.9"}, ["metax"]),
        (("/usr/bin/nvidia-smi",), {"cuda": "12.8"}, []),  # somebody's nvidia-smi proves nothing
        ((DRIVER,), {"cuda": "12.8", "packages": ["torch_npu"]}, ["cuda", "npu"]),
    ],
)
def test_identity_is_told_by_what_belongs_to_one_vendor(machine, files, facts, found):
    probes = machine(*files, **facts)
    assert [name for name, probe in probes.items() if probe.found] == found, probes
    assert all(probe.reason for probe in probes.values())


@pytest.mark.parametrize(("mask", "count"), [(None, 2), ("0", 1), ("", 0)])
def test_metax_stays_metax_whatever_its_mask_hides_and_its_nvidia_smi_says(machine, monkeypatch, mask, count):
    from verl_fl.platform import manager

    def visible():
        import os

        text = os.environ.get("CUDA_VISIBLE_DEVICES")
        return 2 if text is None else len([part for part in text.split(",") if part])

    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    machine("/dev/mxcd", "/usr/bin/nvidia-smi", cuda="11.6", version="2.8.0+metax3.5.3.9")
    monkeypatch.setattr(torch, "cuda", stand_ins.StandIn("torch.cuda", device_count=visible, is_available=True))
    if mask is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    found = manager.detect()
    assert (found.name, found.probes["cuda"].found) == ("metax", False)
    assert torch.cuda.calls == [], "what torch.cuda says proves nothing, so nobody asks"
    assert manager.platform_classes()["metax"]().device_count() == count


def test_no_detection_asks_torch_cuda_which_shims_dress_up(machine, monkeypatch):
    from verl_fl.platform import manager

    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    monkeypatch.setattr(torch, "cuda", stand_ins.StandIn("torch.cuda"))  # refuses every question
    for facts, name in (({}, "cpu"), ({"packages": ["torch_npu"]}, "npu"), ({"packages": ["torch_musa"]}, "musa")):
        machine(**facts)
        found = manager.detect()
        assert (found.name, torch.cuda.calls) == (name, [])
        assert not any("failed" in probe.reason for probe in found.probes.values()), found.probes


def test_hardware_that_this_torch_can_not_use_is_said(machine):
    probes = machine(DRIVER, "/dev/davinci0", cards=[("0x1ed5", "0x030000"), ("0x19e5", "0x020000")])
    assert probes["cuda"].unusable and "this torch (2.9.0) is not built for CUDA" in probes["cuda"].reason
    assert probes["npu"].unusable and "1 device files like /dev/davinci0, but package torch_npu" in probes["npu"].reason
    assert "PCI" not in probes["npu"].reason, "its maker's network card is no accelerator"
    assert probes["musa"].unusable and "1 cards on the PCI bus (0x1ed5)" in probes["musa"].reason
    assert not probes["mlu"].unusable


def test_the_generic_platform_serves_what_torch_reports_and_no_file_knows(monkeypatch):
    from verl_fl.platform.generic import GenericPlatform

    report = types.SimpleNamespace(type="hpu")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: report)
    platform = GenericPlatform()
    assert GenericPlatform.probe().found and "torch reports hpu" in GenericPlatform.probe().reason
    assert (platform.device_name, platform.vendor_name, platform.ray_resource) == ("hpu", "generichpu", "HPU")
    monkeypatch.setattr(torch.distributed.Backend, "default_device_backend_map", {"hpu": "hccl"})
    assert platform.process_group_backend() == "cpu:gloo,hpu:hccl"
    report.type = "strange"
    with pytest.raises(RuntimeError, match="no collective library for 'strange'"):
        platform.communication_backend_name()
    report.type = "cuda"
    assert not GenericPlatform.probe().found, "a device with a file of its own is that file's"
