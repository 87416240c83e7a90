"""A chip that another package brings, and machines whose packages pretend to be something else."""

import json
import os
import subprocess
import sys

import pytest

SHIM = """
def _autoload():  # before torch, which asks for it while this package is half loaded
    pass
import os, torch, types
def visible():
    mask = os.environ.get("{mask}")
    return 2 if mask is None else len([part for part in mask.split(",") if part])
class Module(types.ModuleType):
    def __getattr__(self, name):
        return lambda *a, **k: None
module = Module("torch.{device}")
module.is_available = lambda: visible() > 0
module.device_count = visible
module.current_device = lambda: 0
module.Stream = type("Stream", (), {{}})
torch.{device} = module
if {pretends}:
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = visible
    torch.version.cuda = "12.8"
"""
ASK = """
import json
import verl
from verl.plugin.platform import get_platform
from verl.utils import device
platform = get_platform()
print("ANSWER", json.dumps([
    platform.name, platform.device_count(), bool(device.is_cuda_available), bool(device.is_npu_available),
    device.get_device_name(), platform.process_group_backend(), device.get_resource_name(),
]))
"""


@pytest.fixture
def ask(tmp_path):
    """What verl says in a process where the vendor's package is installed as a stand-in."""

    def run(package, device, mask_variable, mask, pretends=True, code=ASK, **env):
        (tmp_path / f"{package}.py").write_text(SHIM.format(device=device, mask=mask_variable, pretends=pretends))
        clean = {name: value for name, value in os.environ.items() if "VISIBLE" not in name and name != "VERL_PLATFORM"}
        clean |= {"PYTHONPATH": str(tmp_path), **env} | ({} if mask is None else {mask_variable: mask})
        done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=clean, capture_output=True, text=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
        assert lines, done.stdout + done.stderr
        return json.loads(lines[0].removeprefix("ANSWER "))

    return run


NPU = ("torch_npu", "npu", "ASCEND_RT_VISIBLE_DEVICES")
MUSA = ("torch_musa", "musa", "MUSA_VISIBLE_DEVICES")


COUNT = """
import json
from verl_fl.platform import get
print("ANSWER", json.dumps([get().name, get().device_count()]))
"""


@pytest.mark.parametrize("package", [NPU, MUSA], ids=["npu", "musa"])
@pytest.mark.parametrize(("mask", "count"), [(None, 2), ("0", 1), ("", 0)])
def test_a_mask_changes_the_count_and_never_the_vendor(ask, package, mask, count):
    assert ask(*package, mask, code=COUNT) == [package[1], count]


def test_verl_on_a_node_that_shows_no_device_is_the_vendors_all_the_same(ask):
    name, found, cuda, npu, device, backend, resource = ask(*NPU, "")
    assert (name, found, device, resource) == ("npu", 0, "npu", "NPU")
    assert (cuda, npu, backend) == (False, False, "cpu:gloo,npu:hccl")


def test_a_shim_that_makes_torch_cuda_answer_changes_nothing(ask):
    name, _, cuda, npu, device, backend, resource = ask(*MUSA, None)
    assert (name, device, resource, backend) == ("musa", "musa", "MUSA", "cpu:gloo,musa:mccl")
    assert (cuda, npu) == (False, False), "every flag agrees with the platform"


@pytest.mark.parametrize("word", ["NPU", "huawei", " Npu ", "ascend"])
def test_all_its_names_select_it_in_any_case(ask, word):
    code = "import json\nfrom verl_fl.platform import detect\nprint('ANSWER', json.dumps(detect().name))"
    assert ask(*NPU, None, code=code, VERL_PLATFORM=word) == "npu"


AUTOLOAD = """
import json, os, sys
from verl_fl.platform import detect, get
name = detect().name
loaded = [module for module in ("torch", "torch_npu", "torch_musa") if module in sys.modules]
count = get().device_count()
print("ANSWER", json.dumps([name, loaded, count, {k: v for k, v in os.environ.items() if "VISIBLE" in k}]))
"""


@pytest.fixture
def autoloads(tmp_path):
    """Lets ``import torch`` load a package by itself, as real ones do."""

    def make(package):
        folder = tmp_path / f"{package}-9.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 9\n")
        (folder / "entry_points.txt").write_text(f"[torch.backends]\n{package} = {package}:_autoload\n")

    return make


def test_detection_leaves_a_sdk_that_torch_loads_by_itself_its_mask_to_read(ask, autoloads):
    autoloads("torch_musa")
    found = ask(*MUSA, None, code=AUTOLOAD, CUDA_VISIBLE_DEVICES="1")
    assert found == ["musa", [], 1, {"MUSA_VISIBLE_DEVICES": "1"}]


@pytest.mark.parametrize(("package", "loaded"), [("flagcx", False), ("torch_strange", True)])
def test_torch_is_asked_only_where_a_package_may_bring_it_a_device(ask, autoloads, package, loaded):
    autoloads(package)
    code = (
        "import json, sys\nfrom verl_fl.platform import detect\n"
        "print('ANSWER', json.dumps([detect().name, 'torch' in sys.modules]))"
    )
    assert ask(package, "strange", "STRANGE_VISIBLE_DEVICES", None, pretends=False, code=code) == ["cpu", loaded]


BROKEN = {
    "raises": "raise OSError('libx.so.1: cannot open shared object file')",
    "exits": "raise SystemExit(3)",
    "prints": "print('ANSWER []')",
    "hangs": "import time; time.sleep(30)",
    "lacks its driver": "import torch; torch.npu = 0; raise RuntimeError('no driver')",
}
TIMED = """
import json, sys, time
from verl_fl.platform import detect
start = time.perf_counter()
found = detect()
fast = time.perf_counter() - start < 2
print("ANSWER", json.dumps([found.name, fast, "torch" in sys.modules, found.probes["musa"].found]))
"""


@pytest.mark.parametrize("body", BROKEN.values(), ids=BROKEN)
def test_a_broken_package_is_found_without_being_run_and_stops_nobody(ask, autoloads, tmp_path, body):
    autoloads("torch_npu")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "torch_npu.py").write_text(body)
    path = f"{tmp_path / 'broken'}{os.pathsep}{tmp_path}"
    assert ask(*NPU, None, code=TIMED, PYTHONPATH=path) == ["npu", True, False, False]


@pytest.mark.parametrize("how", ["raises", "exits", "lacks its driver"])
def test_its_own_use_says_what_it_raised(ask, tmp_path, how):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "torch_npu.py").write_text(BROKEN[how])
    code = """
import json
from verl_fl.platform import get
try:
    get().device_count()
except RuntimeError as error:
    print("ANSWER", json.dumps(str(error)))
"""
    said = ask(*NPU, None, code=code, PYTHONPATH=f"{tmp_path / 'broken'}{os.pathsep}{tmp_path}")
    assert "torch can't use 'npu' devices here" in said and "package torch_npu is installed" in said


REGISTER = """
import json, verl, verl_fl
from verl_fl.platform import Platform
from verl_fl.patches.platform import detection

class Mine(Platform):
    name = device_name = "mine"
    vendor_name, collective = "me", "mineccl"
    sdk = "json"  # a package that is installed everywhere
    visible_devices, ray_resource = "MINE_VISIBLE_DEVICES", "MINE"

class Taken(Mine):
    aliases = ("cuda",)

class Half(Mine):
    collective = ""

said = []
for cls in (Taken, Half, int, "vendorx", Mine, Mine):
    try:
        verl_fl.register(cls)
        said.append("registered")
    except Exception as error:
        said.append(f"{type(error).__name__}: {error}")
    said.append(detection().name)
import verl.workers.engine.fsdp.transformer_impl
from verl.workers.engine.base import EngineRegistry
engines = sorted(str(key) for key in EngineRegistry._engines["language_model"]["fsdp2"] if "mine" in str(key))
print("ANSWER", json.dumps([said, engines]))
"""


def test_a_package_registers_its_chip_or_is_told_why_not(ask):
    said, engines = ask("unused", "unused", "UNUSED", None, code=REGISTER)
    taken, _, half, _, other, _, word, before, mine, after, again, still = said
    assert (
        taken.startswith("ValueError: platform name 'cuda' is taken")
        and "verl_fl.platform.cuda.CUDAPlatformForVerl has it" in taken
    )
    assert half.startswith("TypeError: platform Half is not complete") and "missing: collective" in half
    assert other.startswith("TypeError: not a platform") and word.startswith("TypeError: not a platform")
    assert (before, mine, after, again, still) == ("cpu", "registered", "mine", "registered", "mine")
    assert engines == ["('mine', 'me')", "mine"]


def test_a_sdk_that_does_not_load_is_a_warning_and_no_device(ask):
    code = (
        "import json, sys, logging\n"
        "from verl_fl.platform import get\n"
        "sys.modules['torch_npu'] = None\n"
        "platform = get()\n"
        "print('ANSWER', json.dumps([platform.name, platform.is_available()]))"
    )
    assert ask(*NPU, None, code=code) == ["npu", False]
