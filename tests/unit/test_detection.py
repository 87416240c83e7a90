"""Which chip is this? Names, evidence, and errors that say what to do."""

import pytest

from verl_fl.platform import manager
from verl_fl.platform.base import Probe


def yes(reason="its driver is loaded"):
    return lambda: Probe(found=True, reason=reason)


def no():
    return Probe(found=False, reason="no driver")


@pytest.fixture(autouse=True)
def nothing_requested(monkeypatch):
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    monkeypatch.delenv("VERL_FL_DRIVER_PLATFORM", raising=False)
    monkeypatch.setattr("sys.argv", ["prog"])


def test_no_evidence_means_cpu():
    found = manager.detect({"vendorx": no})
    assert (found.name, found.explicit) == ("cpu", False)


def test_one_vendor_with_evidence_wins_over_cpu():
    found = manager.detect({"vendorx": yes("pci 1234"), "vendory": no})
    assert (found.name, found.reason, found.explicit) == ("vendorx", "pci 1234", False)


def test_two_vendors_are_an_error_that_lists_both():
    with pytest.raises(ValueError, match="vendorx, vendory") as error:
        manager.detect({"vendorx": yes("a"), "vendory": yes("b")})
    assert "vendorx: yes (a)" in str(error.value) and "VERL_PLATFORM=vendorx" in str(error.value)


def test_a_broken_sdk_is_a_reason_and_never_stops_another_vendor():
    def broken():
        raise OSError("libx.so: cannot open shared object file")

    found = manager.detect({"broken": broken, "vendorx": yes()})
    assert found.name == "vendorx"
    assert "libx.so" in found.probes["broken"].reason


@pytest.mark.parametrize("text", ["cpu", "CPU", " Cpu "])
def test_verl_platform_selects_in_any_case(monkeypatch, text):
    monkeypatch.setenv("VERL_PLATFORM", text)
    found = manager.detect({"vendorx": yes()})
    assert (found.name, found.explicit) == ("cpu", True)


def test_an_alias_selects_its_platform(monkeypatch):
    monkeypatch.setenv("VERL_PLATFORM", "old")
    assert manager.detect({"vendorx": yes()}, {"old": "vendorx"}).name == "vendorx"


def test_an_unknown_name_lists_the_legal_ones(monkeypatch):
    monkeypatch.setenv("VERL_PLATFORM", "cpux")
    with pytest.raises(ValueError, match="unknown platform 'cpux'") as error:
        manager.detect({"vendorx": no})
    assert "VERL_PLATFORM='cpux'" in str(error.value) and "cpu, cuda, generic, huawei" in str(error.value)
    assert "nvidia" in str(error.value) and "vendorx" in str(error.value)


def test_a_platform_that_is_absent_is_an_error_with_every_reason(monkeypatch):
    monkeypatch.setenv("VERL_PLATFORM", "vendorx")
    with pytest.raises(ValueError, match="does not have it") as error:
        manager.detect({"vendorx": no})
    assert "vendorx: no (no driver)" in str(error.value)


@pytest.mark.parametrize("argument", ["+fl=cpu", "fl=cpu", "++fl=cpu"])
def test_the_config_group_on_the_command_line_chooses(monkeypatch, argument):
    monkeypatch.setattr("sys.argv", ["main_ppo", "trainer.nnodes=1", argument])
    found = manager.detect({"vendorx": yes()})
    assert (found.name, found.explicit) == ("cpu", True)
    assert argument in found.reason


def test_the_drivers_choice_is_followed_where_the_node_has_it(monkeypatch):
    monkeypatch.setenv("VERL_FL_DRIVER_PLATFORM", "cpu")
    assert manager.detect({"vendorx": yes()}).name == "cpu"


def test_the_drivers_vendor_is_not_forced_on_a_node_of_another(monkeypatch):
    monkeypatch.setenv("VERL_FL_DRIVER_PLATFORM", "vendorx")
    assert manager.detect({"vendorx": no, "vendory": yes()}).name == "vendory"


@pytest.mark.parametrize("text", ["cuda,npu", "cuda npu", "cpu, cpu"])
def test_two_names_are_refused(monkeypatch, text):
    monkeypatch.setenv("VERL_PLATFORM", text)
    with pytest.raises(ValueError, match="VERL_PLATFORM names several platforms") as error:
        manager.detect()
    assert f"asked: VERL_PLATFORM={text!r}" in str(error.value)


def test_a_probe_that_hangs_exits_or_answers_nonsense_stops_nobody(monkeypatch):
    import sys
    import threading

    release = threading.Event()
    monkeypatch.setattr(manager, "_PROBE_LIMIT_S", 0.2)
    probes = {"hangs": release.wait, "exits": lambda: sys.exit(2), "lies": lambda: True, "vendorx": yes()}
    found = manager.detect(probes)
    release.set()
    assert found.name == "vendorx"
    assert found.probes["hangs"].reason == "its probe did not end in 0.2 s"
    assert "SystemExit" in found.probes["exits"].reason and "not a Probe" in found.probes["lies"].reason


def test_hardware_that_can_not_be_used_is_said_when_the_cpu_is_taken():
    def unusable():
        return Probe(found=False, reason="a card is here, but package torch_x is not installed", unusable=True)

    found = manager.detect({"vendorx": unusable, "vendory": no})
    assert found.name == "cpu" and "vendorx: a card is here, but package torch_x" in found.reason


def test_the_generic_platform_yields_to_a_vendors_and_wins_over_cpu(monkeypatch):
    classes = dict(manager.platform_classes())
    monkeypatch.setattr(classes["generic"], "probe", staticmethod(yes("torch reports hpu")))
    assert manager.detect({"vendorx": no}, classes=classes).name == "generic"
    assert manager.detect({"vendorx": yes()}, classes=classes).name == "vendorx"


def test_generic_which_may_have_to_load_torch_is_asked_only_where_it_may_be_the_answer(monkeypatch):
    asked = []
    classes = dict(manager.platform_classes())
    monkeypatch.setattr(classes["generic"], "probe", staticmethod(lambda: asked.append(1) or yes("torch has it")()))
    found = manager.detect({"vendorx": yes()}, classes=classes)
    assert not asked and found.probes["generic"].reason == "not asked, since vendorx was found"
    assert list(found.probes) == ["vendorx", *classes], "in the order given"
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    assert manager.detect({"vendorx": no}, classes=classes).name == "cpu" and not asked
    monkeypatch.setenv("VERL_PLATFORM", "generic")
    assert manager.detect({"vendorx": yes()}, classes=classes).name == "generic" and asked


def test_threads_that_ask_at_once_get_one_platform(monkeypatch):
    import threading

    manager.reset()
    decisions, got = [], []
    real = manager.detect
    monkeypatch.setattr(manager, "detect", lambda: decisions.append(1) or real())
    threads = [threading.Thread(target=lambda: got.append(manager.get())) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(decisions) == 1 and len(got) == 16 and len({id(platform) for platform in got}) == 1
    manager.reset()


@pytest.mark.parametrize("field", ["platform", "machine"])
def test_doctor_tells_what_needs_no_torch_without_it(field):
    import json
    import subprocess
    import sys

    code = (
        "import sys\nfrom verl_fl.cli import doctor\n"
        f"status = doctor.run(as_json=True, only={field!r})\n"
        "print([m for m in ('torch', 'ray', 'verl', 'transformers') if m in sys.modules], status, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.strip() == "[] 0"
    found = json.loads(done.stdout)
    assert list(found) == [field, "problems", "healthy"] and found[field] and found["healthy"]


def test_doctor_refuses_a_field_that_can_not_be_had_alone():
    from verl_fl.cli import doctor
    from verl_fl.cli._exit import UsageError

    with pytest.raises(UsageError, match="no such field") as error:
        doctor.run(as_json=True, only="patches")
    assert "asked: --only patches" in str(error.value) and "legal: machine, platform" in str(error.value)


def test_a_process_decides_once_and_tests_can_reset_it(monkeypatch):
    manager.reset()
    first = manager.get()
    monkeypatch.setenv("VERL_PLATFORM", "nonsense")
    assert manager.get() is first and first.name == "cpu"
    manager.reset()
    with pytest.raises(ValueError, match="unknown platform 'nonsense'"):
        manager.get()
    monkeypatch.delenv("VERL_PLATFORM")
    assert manager.get() is not first
    manager.reset()


def test_set_platform_is_what_get_platform_returns(fresh_platform):
    from verl_fl.platform.bridge import to_verl
    from verl_fl.platform.cuda import CUDAPlatform

    other = to_verl(CUDAPlatform, fresh_platform.PlatformBase)()
    fresh_platform.set_platform(other)
    assert fresh_platform.get_platform() is other


def test_verls_lookup_gives_the_cpu_platform(monkeypatch, fresh_platform):
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    platform = fresh_platform.get_platform()
    assert (platform.device_name, platform.vendor_name, platform.ray_resource_name()) == ("cpu", "cpu", "fl_cpu")
    assert fresh_platform.get_platform() is platform


def test_an_explicit_cpu_device_is_never_overwritten(monkeypatch, fresh_platform):
    from omegaconf import OmegaConf
    from verl.utils.device import auto_set_device

    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    for before in ("cpu", "cuda"):
        config = OmegaConf.create({"trainer": {"device": before}})
        auto_set_device(config)
        assert config.trainer.device == "cpu"
