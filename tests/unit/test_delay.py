"""The delay of a handler: which changes of a partition may run, and when to look again."""

from __future__ import annotations

import pytest
from bson import Timestamp

from mongo_celery.bridge.existing import make_token
from mongo_celery.bridge.listener.delay import Delay
from mongo_celery.bridge.state.backlog import StoredChange

SECONDS = 10.0
NOW = 5.0
AHEAD = 1000.0
"""The server's clock shows 1005 at NOW."""


def known(*changes: tuple[int, int]) -> list[StoredChange]:
    """Changes by seconds since the time 1000, and key."""
    return [StoredChange(f"82{1000 + at:08X}{number:08X}", hash=key) for number, (at, key) in enumerate(changes, 1)]


def made(*, coalesces: bool, read_to: float = float("inf")) -> Delay:
    one = Delay(SECONDS, coalesces=coalesces)
    one.observe(AHEAD, read_to)
    return one


@pytest.mark.parametrize(
    ("coalesces", "changes", "at", "count", "next_at"),
    [
        (False, [(0, 1), (1, 2)], 10.9, 0, 11),  # its second is rounded up
        (True, [(0, 1), (5, 1)], 12, 0, 16),  # again within the delay
        (True, [(0, 1), (3, 2), (5, 2)], 15, 1, None),  # a key whose next is not due
    ],
)
def test_a_change_runs_after_its_delay_and_a_key_that_coalesces_when_it_is_quiet(
    *, coalesces: bool, changes: list[tuple[int, int]], at: float, count: int, next_at: float | None
) -> None:
    """P10: by the server's clock. `property/test_delay.py` has the oracle."""
    found, again = made(coalesces=coalesces).count_due(known(*changes), at)
    assert found == count
    assert next_at is None or again == next_at


def test_while_changes_may_be_unread_no_key_is_quiet() -> None:
    changes = known((0, 1))
    assert made(coalesces=True, read_to=AHEAD + 10).count_due(changes, 500)[0] == 0
    assert made(coalesces=True, read_to=AHEAD + 11).count_due(changes, 500)[0] == 1
    assert made(coalesces=False, read_to=AHEAD).count_due(changes, 11)[0] == 1


@pytest.mark.parametrize("coalesces", [False, True])
def test_a_snapshot_row_and_what_has_elapsed_are_due_at_once(coalesces: bool) -> None:
    """A row has no time of a change; a runner ends waits."""
    row = StoredChange(make_token(Timestamp(1004, 1), 3, 1), hash=9)
    one, changes = made(coalesces=coalesces), known((4, 1))
    assert one.count_due([row, *changes], NOW)[0] == 1
    one.elapse(changes[0].data)
    assert one.count_due(changes, NOW)[0] == 1


@pytest.mark.parametrize(("at", "count"), [(12, 1), (15.9, 1), (16, 3)])
def test_a_snapshot_row_ends_no_burst(at: float, count: int) -> None:
    """P2: it runs immediately, and the key after it still waits until it is quiet."""
    row = StoredChange(make_token(Timestamp(999, 1), 3, 1), hash=9)
    assert made(coalesces=True).count_due([row, *known((0, 1), (5, 1))], at)[0] == count


def test_nothing_is_due_before_the_servers_time_is_known() -> None:
    found, again = Delay(SECONDS, coalesces=False).count_due(known((0, 1)), NOW)
    assert found == 0
    assert NOW < again < NOW + 1
    assert made(coalesces=False).age(known((0, 1))[0].data, NOW) == pytest.approx(4)
