"""What was handed over and is not taken in yet."""

from __future__ import annotations

from mongo_celery.bridge.listener.inbox import Inbox
from tests.fixtures.samples import mark


def test_items_are_taken_one_by_one_in_the_order_in_which_they_came() -> None:
    """P1: some at a time, and one of them is the next until it is taken."""
    inbox = Inbox()
    for numbers in ((1, 2, 3), (4,), (), (5, 6)):
        inbox.put([mark(number) for number in numbers])
    found = []
    while (item := inbox.look()) is not None:
        assert inbox.look() is inbox.held is item
        found.append((item, inbox.take()))
    assert found == [(mark(number), number in {3, 4, 6}) for number in range(1, 7)]
    assert inbox.held is None


def test_what_was_taken_is_told_once() -> None:
    """So that there is room for as much again, also where it was not all that had come together."""
    inbox = Inbox()
    inbox.put([mark(1), mark(2), mark(3)])
    assert list(inbox.taken()) == []
    for numbers in ([1, 2], [3]):
        for _ in numbers:
            inbox.look()
            inbox.take()
        assert list(inbox.taken()) == [mark(number) for number in numbers]
        assert list(inbox.taken()) == []


def test_a_wait_ends_with_an_item_or_when_somebody_ends_it() -> None:
    """What ends it is no item."""
    inbox = Inbox()
    inbox.put(())
    inbox.wait(60.0)
    assert inbox.look() is None
    inbox.put([mark(1)])
    inbox.wait(60.0)
    assert inbox.held == mark(1)
    inbox.take()
    inbox.wait(0.0)
    assert inbox.held is None
