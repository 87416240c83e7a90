"""Weight sync under faults: every end ends in time, in an error or with the right bytes, and the next sync works."""

import pytest
from weight_sync_faults import FAULTS, Fault, Rig, nothing_left, items


@pytest.fixture(autouse=True)
def _nothing_left():
    with nothing_left():
        yield


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(transport="unix"),
        dict(transport="shm"),
        dict(receivers=3, apart=True, topology="chain"),
        dict(ranks=2),
        dict(ranks=2, receivers=2, transport="shm", delta=True),
        dict(delta=True, keep_old=True),
        dict(drawn=True),
        dict(drawn=True, delta=True),
        dict(receivers=3, apart=True, topology="tree", delta=True, ranks=2),
    ],
    ids=str,
)
def test_clean(options):
    with Rig(**options) as rig:
        for version in range(1, 5):
            rig.well(version)
