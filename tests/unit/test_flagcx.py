"""FlagCX: found or not, with the reason; asked for and not to be had is an error, never another library."""

import sys
import types

import pytest

from verl_fl.platform import evidence, flagcx
from verl_fl.platform.cpu import CPUPlatform
from verl_fl.platform.cuda import CUDAPlatform
from verl_fl.platform.musa import MUSAPlatform


@pytest.fixture(autouse=True)
def nowhere(monkeypatch, tmp_path):
    monkeypatch.setattr(evidence, "ROOT", tmp_path / "root")
    for name in ("FLAGCX_PATH", "USE_FLAGCX"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def library(monkeypatch, tmp_path):
    """A build whose library exports the given names."""

    def build(*symbols, folder="build/lib"):
        place = tmp_path / "FlagCX" / folder
        place.mkdir(parents=True)
        (place / "libflagcx.so").write_bytes(b"\x7fELF" + b"\0".join(symbol.encode() for symbol in symbols))
        monkeypatch.setenv("FLAGCX_PATH", str(tmp_path / "FlagCX"))
        return place / "libflagcx.so"

    return build


@pytest.fixture
def package(monkeypatch):
    monkeypatch.setitem(sys.modules, "flagcx", types.ModuleType("flagcx"))


def test_absent_says_where_it_looked(monkeypatch):
    found = flagcx.find()
    assert not found.found and "no libflagcx.so in" in found.reason and "FLAGCX_PATH is not set" in found.reason
    monkeypatch.setenv("FLAGCX_PATH", "/opt/nothing")
    assert "/opt/nothing/build/lib" in flagcx.find().reason


@pytest.mark.parametrize(
    ("symbols", "api"),
    [
        (["flagcxDeviceHandleInit", "flagcxSend"], "devHandle"),
        (["flagcxHandleInit", "flagcxSend"], "handle"),
        (["other"], ""),
        ([""], ""),
    ],
)
@pytest.mark.parametrize("folder", ["", "lib", "build/lib"])
def test_the_api_is_told_by_the_exported_names(library, symbols, api, folder):
    path = library(*symbols, folder=folder)
    found = flagcx.find()
    assert (found.found, found.library, found.api) == (True, str(path), api)


def test_unset_or_off_the_vendors_own_library_serves(monkeypatch, library, package):
    library("flagcxDeviceHandleInit")
    assert CUDAPlatform().communication_backend_name() == "nccl", "FLAGCX_PATH alone changes nothing"
    monkeypatch.setenv("USE_FLAGCX", "0")
    assert MUSAPlatform().communication_backend_name() == "mccl"


@pytest.mark.parametrize("text", ["1", "true", "YES"])
@pytest.mark.parametrize("platform", [CUDAPlatform, MUSAPlatform])
def test_asked_for_and_there_it_is_the_backend_of_every_group(monkeypatch, library, package, platform, text):
    library("flagcxDeviceHandleInit")
    monkeypatch.setenv("USE_FLAGCX", text)
    assert platform().communication_backend_name() == "flagcx"
    assert platform().process_group_backend() == f"cpu:gloo,{platform.device_name}:flagcx"


def test_asked_for_and_absent_is_an_error_with_the_reason(monkeypatch, library):
    monkeypatch.setenv("USE_FLAGCX", "1")
    with pytest.raises(RuntimeError, match="FlagCX can't be the collective library of cuda here") as error:
        CUDAPlatform().communication_backend_name()
    assert "found: no libflagcx.so in" in str(error.value) and "asked: USE_FLAGCX=1" in str(error.value)
    library("flagcxHandleInit")
    with pytest.raises(RuntimeError, match="the Python package flagcx, is not installed"):
        CUDAPlatform().communication_backend_name()
    with pytest.raises(RuntimeError, match="FlagCX has no adaptor for cpu"):
        CPUPlatform().communication_backend_name()


def test_a_plugin_that_does_not_load_is_said(monkeypatch, library, tmp_path):
    library("flagcxDeviceHandleInit")
    (tmp_path / "flagcx.py").write_text("raise OSError('libcudart.so.12: cannot open')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("USE_FLAGCX", "1")
    with pytest.raises(RuntimeError, match="the package flagcx does not load: OSError: libcudart"):
        CUDAPlatform().communication_backend_name()


def test_a_switch_that_is_neither_on_nor_off_is_refused(monkeypatch):
    monkeypatch.setenv("USE_FLAGCX", "maybe")
    with pytest.raises(ValueError, match="USE_FLAGCX is a switch") as error:
        CUDAPlatform().communication_backend_name()
    assert "asked: USE_FLAGCX='maybe'" in str(error.value)


def test_a_library_that_can_not_be_read_is_said(monkeypatch, library):
    def refuse(path):
        raise PermissionError(13, "Permission denied")

    library("flagcxDeviceHandleInit")
    monkeypatch.setattr(flagcx, "_api", refuse)
    found = flagcx.find()
    assert not found.found and found.reason.endswith("libflagcx.so can't be read: Permission denied")


@pytest.mark.parametrize(("switch", "healthy"), [("0", True), ("1", False), ("maybe", False)])
def test_doctor_tells_that_a_run_would_fail_for_want_of_it(monkeypatch, switch, healthy):
    from verl_fl.cli import doctor

    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    monkeypatch.setenv("USE_FLAGCX", switch)
    report = doctor._alone("platform")
    assert report.healthy is healthy
    if switch == "1":
        assert report.platform["name"] == "cpu", "the rest is told as ever"
        assert "FlagCX has no adaptor for cpu" in report.problems[0] and "asked: USE_FLAGCX=1" in report.problems[0]
