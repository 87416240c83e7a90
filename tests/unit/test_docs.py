"""The docs are true: generated pages match, and every path and option they name exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    *(
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "verl_fl/platform/README.md", "examples/new_chip/README.md")
    ),
    *sorted((ROOT / "docs").glob("*.md")),
]


def test_the_ledger_page_is_the_ledger():
    import verl_fl.patches  # noqa: F401
    from verl_fl.patches.__main__ import markdown

    assert (ROOT / "docs" / "patches.md").read_text() == markdown()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_path_in_a_page_exists(page):
    named = set(
        re.findall(r"`((?:verl_fl|tests|benchmarks|docs|examples|scripts|hydra_plugins)/[\w./-]*)`", page.read_text())
    )
    named |= {link for link in re.findall(r"\]\(([\w./-]+)\)", page.read_text())}
    missing = {path for path in named if not (ROOT / path).exists() and not (page.parent / path).exists()}
    assert not missing


def composed():
    from hydra import compose, initialize_config_module
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=["+fl=cpu"])


def test_every_option_in_the_cpu_page_exists_with_the_default_it_gives():
    from omegaconf import OmegaConf

    config = composed()
    options = (ROOT / "docs" / "cpu.md").read_text().partition("## Options of the group")[2]
    rows = re.findall(r"^\| `([\w.]+\.[\w.]+)` \| ([^|]+) \|", options, re.M)
    assert len(rows) > 15
    for key, default in rows:
        value = OmegaConf.select(config, key)
        assert value is not None, key
        assert str(value).lower() == default.strip(" `").lower(), key


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "verl_fl/config/fl").glob("*.yaml")))
def test_every_group_is_of_a_platform_and_names_its_device(name):
    from hydra import compose, initialize_config_module
    from hydra.core.global_hydra import GlobalHydra

    from verl_fl.platform.manager import platform_classes

    GlobalHydra.instance().clear()
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=[f"+fl={name}"])
    assert config.fl.platform == name
    assert config.trainer.device == platform_classes()[name].device_name


def test_the_users_own_override_wins_over_the_group():
    from hydra import compose, initialize_config_module
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=["+fl=cpu", "actor_rollout_ref.rollout.max_num_seqs=7"])
    assert config.actor_rollout_ref.rollout.max_num_seqs == 7
    assert config.actor_rollout_ref.rollout.name == "native" and config.fl.platform == "cpu"
