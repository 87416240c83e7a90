"""Device masks are read strictly, before a runtime reads them in its own way."""

import os
import subprocess
import sys

import pytest

from verl_fl.platform import masks
from verl_fl.platform.cuda import CUDAPlatform
from verl_fl.platform.musa import MUSAPlatform
from verl_fl.testing.simulated.vendors import SimX


@pytest.mark.parametrize(("text", "ids"), [("", []), ("  ", []), ("0", ["0"]), ("3, 1", ["3", "1"]), ("00", ["00"])])
def test_a_mask_is_its_ids_in_its_order(text, ids):
    assert masks.parse(text, variable="X_VISIBLE_DEVICES") == ids


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("0,,1", "has a gap"),
        ("0,1,", "has a gap"),
        ("0,a", "has 'a', which is not a device id"),
        ("-1", "has '-1', which is not a device id"),
        ("1.5", "has '1.5'"),
        ("2,2", "has 2 twice"),
        ("0,1,2", "has 3 ids"),
        ("5", "has 5, which does not exist"),
        ("GPU-8f1c", "has 'GPU-8f1c'"),
        ("0,00", "has 0 twice"),
        ("\u0661", "has '\u0661', which is not a device id"),  # a digit to Python, and to no runtime
    ],
)
def test_what_is_no_mask_is_refused_in_four_parts(text, problem):
    with pytest.raises(ValueError) as error:
        masks.parse(text, variable="X_VISIBLE_DEVICES", device_count=2)
    message = str(error.value)
    assert f"X_VISIBLE_DEVICES {problem}" in message and f"asked: X_VISIBLE_DEVICES={text!r}" in message
    assert "found: 2 devices" in message and "legal: ids from 0" in message and "do: correct" in message


def test_uuids_are_ids_where_the_runtime_takes_them():
    assert masks.parse("GPU-8f1c,MIG-2", variable="C", uuids=True) == ["GPU-8f1c", "MIG-2"]
    for text, problem in [("banana-split", "UUIDs"), ("GPU-8f1c,GPU-8f1c", "twice"), ("GPU-8f1c,", "gap")]:
        with pytest.raises(ValueError, match=problem):
            masks.parse(text, variable="C", uuids=True)


def test_an_index_is_the_position_of_the_id_that_ray_reported(monkeypatch):
    platform = SimX()
    monkeypatch.delenv("SIMX_VISIBLE_DEVICES", raising=False)
    assert platform.device_index("3") == 3
    monkeypatch.setenv("SIMX_VISIBLE_DEVICES", "2,3")
    assert (platform.device_index("3"), platform.device_id(1)) == (1, "3")
    with pytest.raises(ValueError, match="device 0 was assigned.*hides it") as error:
        platform.device_index("0")
    assert "legal: one of 2, 3" in str(error.value)


SHOW = (
    "import json, os, logging; logging.basicConfig()\n"
    "from verl_fl.platform.{module} import {name}\n"
    "{before}\n"
    "print(json.dumps([{name}().adopt_mask(), {{k: v for k, v in os.environ.items() if 'VISIBLE' in k}}]))"
)


def adopted(tmp_path, module, name, before="", **masks_set):
    (tmp_path / "torch_musa.py").write_text("")
    env = {key: value for key, value in os.environ.items() if "VISIBLE" not in key}
    env |= {"PYTHONPATH": str(tmp_path), **masks_set}
    code = SHOW.format(module=module, name=name, before=before)
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)


CUDA, MUSA = "CUDA_VISIBLE_DEVICES", "MUSA_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("given", "expected", "warns"),
    [
        ({CUDA: "1"}, '[["1"], {"MUSA_VISIBLE_DEVICES": "1"}]', False),
        ({MUSA: "1"}, '[["1"], {"MUSA_VISIBLE_DEVICES": "1"}]', False),
        ({CUDA: "0", MUSA: "1"}, '[["1"], {"MUSA_VISIBLE_DEVICES": "1"}]', True),
        ({}, "[null, {}]", False),
        ({CUDA: ""}, "[null, {}]", False),
        ({MUSA: ""}, '[[], {"MUSA_VISIBLE_DEVICES": ""}]', False),
    ],
    ids=["CUDA", "MUSA", "both", "none", "Ray's empty CUDA", "MUSA hides all"],
)
def test_on_musa_only_musas_mask_remains_and_the_explicit_one_wins(tmp_path, given, expected, warns):
    done = adopted(tmp_path, "musa", "MUSAPlatform", **given)
    assert done.stdout.strip() == expected, done.stderr
    assert ("CUDA_VISIBLE_DEVICES=0 is ignored here" in done.stderr) is warns


def test_on_musa_a_mask_that_comes_after_the_sdk_is_an_error(tmp_path):
    done = adopted(tmp_path, "musa", "MUSAPlatform", before="import torch_musa", **{CUDA: "1"})
    assert "CUDA_VISIBLE_DEVICES comes too late" in done.stderr and "MUSA_VISIBLE_DEVICES=1" in done.stderr
    fine = adopted(tmp_path, "musa", "MUSAPlatform", before="import torch_musa", **{CUDA: "0", MUSA: "1"})
    assert fine.returncode == 0, "the runtime has read its own mask, and that one counts"


def test_on_cuda_nothing_changes(tmp_path):
    done = adopted(tmp_path, "cuda", "CUDAPlatform", **{CUDA: "0", MUSA: "1"})
    assert done.stdout.strip() == '[["0"], {"CUDA_VISIBLE_DEVICES": "0", "MUSA_VISIBLE_DEVICES": "1"}]'
    assert (CUDAPlatform.mask_aliases, MUSAPlatform.mask_aliases) == ((), (CUDA,))
