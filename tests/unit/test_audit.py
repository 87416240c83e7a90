"""The audit of verl: complete for the installed one, and it notices what a new one brings."""

import json
import shutil

import pytest

from verl_fl.cli import audit_view
from verl_fl.patches import LEDGER, audit
from verl_fl.platform.base import Platform


@pytest.fixture(scope="module")
def verl():
    return audit.installed()


@pytest.fixture
def copied(verl, tmp_path, monkeypatch):
    """A copy of a part of verl, and the judgements of that part."""
    names = ["utils/distributed.py", "single_controller/base/worker.py", "trainer/main_ppo.py"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(verl / name, tmp_path / name)
    judgements = [judgement for judgement in audit.load() if judgement.file in names]
    monkeypatch.setattr(audit, "load", lambda: judgements)
    assert audit.run(tmp_path).complete
    return tmp_path


def change(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_every_place_of_the_installed_verl_is_judged(verl):
    result = audit.run(verl)
    assert result.unjudged == [] and result.stale == []
    assert len(result.judged) > 300


def test_what_routes_a_place_exists():
    from importlib.util import find_spec

    for judgement in audit.load():
        assert bool(judgement.by) == (judgement.verdict == "routed"), judgement
        for name in judgement.by:
            if name.startswith("Platform."):
                method = name.partition(".")[2]
                assert hasattr(Platform, method) or method in Platform.__annotations__, name
            elif name.startswith("verl_fl."):
                assert find_spec(name), name
            else:
                assert name in LEDGER.patches, name


def test_what_is_open_says_which_feature_it_is():
    for judgement in audit.load():
        assert judgement.verdict != "open" or "=" in judgement.why, judgement


def test_a_new_place_is_reported_with_its_line(copied, capsys, monkeypatch):
    path = copied / "utils" / "distributed.py"
    change(
        path, "def destroy_global_process_group():\n", "def destroy_global_process_group():\n    torch.cuda.reset()\n"
    )
    (copied / "new.py").write_text("x = 1\n")
    result = audit.run(copied)
    assert [(place.scope, place.kind, place.text) for place in result.unjudged] == [
        ("destroy_global_process_group", "torch.cuda", "torch.cuda.reset()")
    ]
    assert result.stale == []
    monkeypatch.setattr(audit, "installed", lambda: copied)
    assert audit_view.run(as_json=False) == 1
    shown = " ".join(capsys.readouterr().out.split())
    line = path.read_text().splitlines().index("    torch.cuda.reset()") + 1
    assert f"utils/distributed.py:{line} in destroy_global_process_group [torch.cuda]" in shown
    assert "does not fit this verl" in shown


def test_a_second_place_like_a_judged_one_is_reported(copied):
    change(copied / "utils" / "distributed.py", "        pynvml.nvmlInit()\n", "        pynvml.nvmlInit()\n" * 2)
    result = audit.run(copied)
    assert [place.text for place in result.unjudged] == ["pynvml.nvmlInit()"] and not result.stale


def test_a_line_that_moved_or_was_indented_anew_is_the_same_place(copied):
    path = copied / "utils" / "distributed.py"
    path.write_text("# one\n# more\n" + path.read_text())
    change(path, "        import pynvml\n", "        if True:\n            import   pynvml\n")
    assert audit.run(copied).complete


def test_a_judgement_without_its_place_is_stale(copied, capsys, monkeypatch):
    change(copied / "utils" / "distributed.py", "        import pynvml\n", "        import other\n")
    result = audit.run(copied)
    assert result.unjudged == []
    assert result.stale == [("utils/distributed.py", "set_numa_affinity | pynvml | import pynvml")]
    monkeypatch.setattr(audit, "installed", lambda: copied)
    assert audit_view.run(as_json=True) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["complete"] is False and report["stale"][0]["place"].endswith("import pynvml")


def test_the_json_of_a_new_place_can_be_pasted_as_a_judgement(copied, capsys, monkeypatch, tmp_path):
    (copied / "fresh.py").write_text("import cupy\n")
    monkeypatch.setattr(audit, "installed", lambda: copied)
    assert audit_view.run(as_json=True) == 1
    (entry,) = json.loads(capsys.readouterr().out)["unjudged"]
    entry |= {"verdict": "harmless", "why": "a test"}
    judgements = [*audit.load(), audit.Judgement(**{**entry, "by": (), "places": tuple(entry["places"])})]
    assert audit.compare(audit.scan(copied), judgements).complete


@pytest.mark.parametrize(
    ("source", "kinds"),
    [
        ("torch.cuda.synchronize()", ["torch.cuda"]),
        ("import torch.cuda", ["torch.cuda"]),
        ("from torch.cuda import nvtx", ["nvtx", "torch.cuda"]),
        ("from torch import cuda", ["torch.cuda"]),
        ("x.to(y).cuda()", [".cuda()"]),
        ("x = torch.device('cuda:0')", ['"cuda"']),
        ("x = f'cuda:{i}'", ['"cuda"']),
        ("x = (\n    'a '\n    f'{torch.cuda.device_count()} '\n    f'{y} cuda'\n)", ['"cuda"', "torch.cuda"]),
        ("x = 'cpu:gloo,cuda:nccl'", ['"cuda"', "nccl"]),
        ("from flash_attn.bert_padding import pad_input", ["flash_attn"]),
        ("a = dict(attn_implementation='flash_attention_2')", ["flash_attention"]),
        ("if is_cuda_available: pass", ["is_*_available"]),
        ("from verl.utils.device import is_npu_available", ["is_*_available"]),
        ("os.environ['CUDA_VISIBLE_DEVICES']", ["visibility mask"]),
        ("f.options(num_gpus=1)", ["num_gpus"]),
        ("n = node['GPU']", ['"GPU"']),
        ("import pynvml as nv", ["pynvml"]),
        ("from cupy.cuda import nccl", ["cupy", "nccl"]),
        ("get_torch_device().mem_get_info()", ["mem_get_info"]),
        ("# torch.cuda.synchronize()", []),
        ("def f():\n    'moves to cuda'", []),
        ("class A:\n    x: int = 1\n    '''torch.cuda'''", []),
        ("x = 'barracuda'", []),
        ("import torch_cudagraph", []),
    ],
)
def test_what_counts_as_a_place(tmp_path, source, kinds):
    (tmp_path / "f.py").write_text(source + "\n")
    assert sorted(place.kind for place in audit.scan(tmp_path)) == kinds


def test_parts_of_an_f_string_have_the_line_of_the_whole(tmp_path):
    """Python 3.11 and 3.12 see them at different lines, and the key holds the line's text."""
    (tmp_path / "f.py").write_text('x = f"""one\n{y} cuda {torch.cuda.z}\n"""\n')
    assert {(place.text, place.line) for place in audit.scan(tmp_path)} == {('x = f"""one', 1)}


def test_a_judgement_without_a_reason_is_refused(tmp_path):
    path = tmp_path / "verdicts.json"
    path.write_text(json.dumps([{"file": "a.py", "verdict": "fine", "why": "", "places": []}]))
    with pytest.raises(ValueError, match=r"verdicts.json: a.py: a judgement needs a reason"):
        audit.load(path)


def test_the_command_lists_by_verdict_and_succeeds():
    from typer.testing import CliRunner

    from verl_fl.cli.main import app

    result = CliRunner().invoke(app, ["doctor", "--audit"])
    assert result.exit_code == 0, result.output
    for title in ("routed: ", "harmless: ", "every place is judged"):
        assert title in result.output


def test_auditing_loads_neither_torch_nor_verl():
    import subprocess
    import sys

    code = (
        "import sys; from verl_fl.patches import audit; assert audit.run().complete; "
        "print([name for name in ('torch', 'ray', 'verl') if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
