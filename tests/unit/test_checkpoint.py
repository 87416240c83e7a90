"""Checkpoints: which one a run resumes from, and what a full disk leaves behind."""

import logging
import zipfile
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from verl_fl import checkpoints
from verl_fl.patches.checkpoint import check_space, whole_save

KINDS = ("model", "optim", "extra_state")


def write_whole(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("data", b"x" * 2000)


def truncate(path):
    path.write_bytes(path.read_bytes()[:500])


def make_step(root, step, world=2, roles=("actor",), data=True):
    folder = root / f"global_step_{step}"
    for role in roles:
        for rank in range(world):
            for kind in KINDS:
                write_whole(folder / role / f"{kind}_world_size_{world}_rank_{rank}.pt")
        (folder / role / "huggingface").mkdir(parents=True)
    if data:
        write_whole(folder / "data.pt")
    return folder


def track(root, text):
    (root / checkpoints.TRACKER).write_text(str(text))


def find(root):
    from verl.trainer.ppo.v1 import trainer_base  # the name that the trainer calls

    found = trainer_base.find_latest_ckpt_path(str(root))
    return None if found is None else found.rpartition("/")[2]


def test_the_tracked_whole_checkpoint_is_taken_in_silence(tmp_path, caplog):
    make_step(tmp_path, 1)
    make_step(tmp_path, 2, roles=("actor", "critic"))
    track(tmp_path, 2)
    assert find(tmp_path) == "global_step_2"
    assert caplog.records == []


def test_no_checkpoint_at_all_starts_from_zero(tmp_path, caplog):
    assert find(tmp_path) is None
    assert find(tmp_path / "nowhere") is None
    assert caplog.records == []
    track(tmp_path, 7)
    assert find(tmp_path) is None
    assert "names step 7, and there is no such folder" in caplog.text


@pytest.mark.parametrize(
    ("text", "said"),
    [(None, "is missing, though there are checkpoints"), ("", "is empty"), ("3\0", "holds '3\\x00' and no step")],
)
def test_a_tracker_that_does_not_tell_is_named_and_the_newest_whole_one_is_taken(tmp_path, caplog, text, said):
    make_step(tmp_path, 1)
    make_step(tmp_path, 3)
    if text is not None:
        track(tmp_path, text)
    assert find(tmp_path) == "global_step_3"
    assert said in caplog.text


@pytest.mark.parametrize("name", ["actor/optim_world_size_2_rank_1.pt", "data.pt"])
def test_a_truncated_file_sends_the_run_to_the_checkpoint_before(tmp_path, caplog, name):
    make_step(tmp_path, 1)
    truncate(make_step(tmp_path, 2) / name)
    track(tmp_path, 2)
    assert find(tmp_path) == "global_step_1"
    assert f"{name.rpartition('/')[2]} is truncated), skipped" in caplog.text
    assert "resuming from step 1, though the tracker names step 2" in caplog.text


def test_a_half_written_newer_folder_is_skipped_and_named(tmp_path, caplog):
    make_step(tmp_path, 1)
    (make_step(tmp_path, 2, data=False) / "actor" / "extra_state_world_size_2_rank_1.pt").unlink()
    track(tmp_path, 1)
    assert find(tmp_path) == "global_step_1"
    assert "half-written (actor: extra_state of rank 1 of 2 is missing), skipped" in caplog.text


def test_killed_before_data_pt_is_half_written_and_killed_after_it_is_whole(tmp_path, caplog):
    make_step(tmp_path, 1)
    newer = make_step(tmp_path, 2, data=False)
    track(tmp_path, 1)
    assert find(tmp_path) == "global_step_1"
    assert "no data.pt, which is written last" in caplog.text
    write_whole(newer / "data.pt")
    assert find(tmp_path) == "global_step_2"


@pytest.mark.parametrize("roles", [("actor",), ("actor", "critic")])
def test_where_only_the_place_in_the_data_is_missing_the_model_is_not_thrown_away(tmp_path, caplog, roles):
    """What verl leaves that keeps one checkpoint and is killed right after it has written the next one's model."""
    (tmp_path / "global_step_3").mkdir()
    track(tmp_path, 3)
    make_step(tmp_path, 4, roles=roles, data=False)
    assert find(tmp_path) == "global_step_4"
    assert "the data begins anew" in caplog.text


def test_an_actor_without_its_critic_is_not_taken(tmp_path):
    (tmp_path / "global_step_3" / "critic").mkdir(parents=True)
    make_step(tmp_path, 4, data=False)
    with pytest.raises(RuntimeError, match="none is whole"):
        find(tmp_path)


def test_a_finished_save_may_have_its_other_ranks_on_another_node(tmp_path):
    folder = make_step(tmp_path, 2)
    for kind in KINDS:
        (folder / "actor" / f"{kind}_world_size_2_rank_1.pt").unlink()
    track(tmp_path, 2)
    assert find(tmp_path) == "global_step_2"


def test_a_format_without_shards_is_trusted_up_to_the_tracker(tmp_path):
    for step in (1, 2):
        folder = make_step(tmp_path, step, world=0)
        (folder / "actor" / "dist_ckpt").mkdir()
    track(tmp_path, 1)
    assert find(tmp_path) == "global_step_1"


def test_checkpoints_of_which_none_is_whole_are_never_a_silent_restart(tmp_path):
    truncate(make_step(tmp_path, 2) / "data.pt")
    (tmp_path / "global_step_4" / "actor").mkdir(parents=True)
    track(tmp_path, 2)
    with pytest.raises(RuntimeError) as error:
        find(tmp_path)
    assert "none is whole" in str(error.value)
    assert "global_step_4: no shard in actor; global_step_2: data.pt is truncated" in str(error.value)
    assert "trainer.resume_mode=disable" in str(error.value)


def trainer(root, step, **settings):
    node = {"default_local_dir": str(root), **settings}
    return SimpleNamespace(config=OmegaConf.create({"trainer": node}), global_steps=step)


def test_a_save_that_finds_no_room_is_not_begun(tmp_path, monkeypatch):
    folder = make_step(tmp_path, 1)
    monkeypatch.setattr(checkpoints, "free_bytes", lambda folder: 1000)
    with pytest.raises(
        RuntimeError, match="can't hold another checkpoint, so it was not begun\n  asked: .*global_step_1"
    ):
        check_space(tmp_path, trainer(tmp_path, 2).config.trainer)
    monkeypatch.setattr(checkpoints, "free_bytes", lambda path: checkpoints.size_of(folder))
    check_space(tmp_path, trainer(tmp_path, 2).config.trainer)


def test_room_that_verl_will_make_first_counts(tmp_path, monkeypatch):
    make_step(tmp_path, 1)
    make_step(tmp_path, 2)
    monkeypatch.setattr(checkpoints, "free_bytes", lambda folder: 1000)
    check_space(tmp_path, trainer(tmp_path, 3, max_actor_ckpt_to_keep=2).config.trainer)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("PytorchStreamWriter failed")])
def test_a_disk_that_fills_up_leaves_no_half_checkpoint_and_the_tracker_as_it_was(tmp_path, error):
    make_step(tmp_path, 1)
    track(tmp_path, 1)

    def save(self):
        write_whole(tmp_path / "global_step_2" / "actor" / "model_world_size_1_rank_0.pt")
        raise error

    with pytest.raises(RuntimeError, match="could not be written, and what there was of it has been removed"):
        whole_save(save)(trainer(tmp_path, 2))
    assert not (tmp_path / "global_step_2").exists()
    assert find(tmp_path) == "global_step_1"


def test_another_fault_while_saving_is_passed_on_untouched(tmp_path):
    def save(self):
        write_whole(tmp_path / "global_step_2" / "actor" / "x.pt")
        raise KeyError("model")

    with pytest.raises(KeyError):
        whole_save(save)(trainer(tmp_path, 2))
    assert (tmp_path / "global_step_2").exists()


@pytest.fixture(autouse=True)
def heard(caplog):
    caplog.set_level(logging.WARNING)
