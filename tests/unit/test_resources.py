"""Demand against supply, per platform and per node, before anything waits."""

import threading
from types import SimpleNamespace

import pytest

from verl_fl.patches import resources


def cluster(monkeypatch, *nodes):
    import ray

    rows = [
        {"Alive": True, "NodeManagerAddress": f"10.0.0.{i}", "NodeID": f"{i}" * 8, "Resources": node}
        for i, node in enumerate(nodes, 1)
    ]
    monkeypatch.setattr(ray, "nodes", lambda: rows)


@pytest.fixture
def musa(monkeypatch):
    platform = SimpleNamespace(ray_resource_name=lambda: "MUSA")
    monkeypatch.setattr(resources._verl, "current_platform", lambda: platform)


def pools(**spec):
    from verl.single_controller.ray import ResourcePoolManager

    return ResourcePoolManager(resource_pool_spec=spec, mapping={})


def test_devices_are_counted_by_the_platforms_own_resource(monkeypatch, musa):
    cluster(monkeypatch, {"GPU": 2.0}, {"MUSA": 4.0})
    pools(trainer=[4])._check_resource_available()


def test_another_vendors_devices_do_not_count(monkeypatch, musa):
    cluster(monkeypatch, {"GPU": 8.0}, {"MUSA": 2.0})
    with pytest.raises(ValueError, match="MUSA is short") as error:
        pools(trainer=[4])._check_resource_available()
    message = str(error.value)
    assert "MUSA 4" in message and "10.0.0.2 (222222): MUSA 2" in message and "10.0.0.1 (111111): MUSA 0" in message


def test_a_node_with_both_kinds_serves_the_one_that_is_asked_for(monkeypatch, musa):
    cluster(monkeypatch, {"NPU": 4.0, "GPU": 0.0, "MUSA": 1.0})
    pools(trainer=[1])._check_resource_available()


def test_a_group_must_fit_on_one_node(monkeypatch):
    cluster(monkeypatch, {"CPU": 4.0, "GPU": 2.0}, {"CPU": 4.0, "GPU": 2.0})
    resources.check_demand([{"CPU": 4.0, "GPU": 2.0}, {"CPU": 4.0, "GPU": 2.0}], what="pool")
    with pytest.raises(ValueError, match="CPU is short"):
        resources.check_demand([{"CPU": 6.0, "GPU": 2.0}], what="pool")


def test_four_cpus_can_not_hold_two_bundles_of_three(monkeypatch):
    cluster(monkeypatch, {"CPU": 4.0, "GPU": 2.0})
    with pytest.raises(ValueError, match="can never hold pool 'p'") as error:
        resources.check_demand([{"CPU": 6.0, "GPU": 2.0}], what="pool 'p'")
    assert "ray start --num-cpus=10 --num-gpus=2" in str(error.value)
    resources.check_demand([{"CPU": 4.0, "GPU": 2.0}], what="pool 'p'")


def test_groups_that_fit_alone_but_not_together_are_refused(monkeypatch):
    cluster(monkeypatch, {"CPU": 4.0})
    with pytest.raises(ValueError, match="the groups together is short"):
        resources.check_demand([{"CPU": 3.0}, {"CPU": 3.0}], what="pools")


def test_a_way_to_place_is_found_where_the_first_fit_is_none(monkeypatch):
    cluster(monkeypatch, {"CPU": 6.0}, {"CPU": 4.0})
    resources.check_demand([{"CPU": 4.0}, {"CPU": 3.0}, {"CPU": 3.0}], what="pools")


def test_the_wait_has_a_limit_and_shows_demand_and_supply(monkeypatch):
    import time

    import ray

    monkeypatch.setenv("VERL_FL_PLACEMENT_TIMEOUT_S", "0.3")
    monkeypatch.setattr(ray._private.state, "available_resources_per_node", lambda: {"abcdef": {"CPU": 1.0}})
    never = threading.Event()
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="within 0.3 s") as error:
        resources._wait(never.wait, [{"CPU": 3.0}], "pool 'p'")
    assert time.monotonic() - start < 3
    never.set()
    assert "asked: CPU 3" in str(error.value) and "abcdef: CPU 1" in str(error.value)


def test_what_goes_wrong_while_placing_is_raised_as_it_is():
    def fail():
        raise KeyError("the cause")

    with pytest.raises(KeyError, match="the cause"):
        resources._wait(fail, [{"CPU": 1.0}], "pool")
