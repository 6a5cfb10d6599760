"""The batches that were handed over and are not taken in yet."""

from __future__ import annotations

from mongo_celery.bridge.listener.inbox import Inbox
from tests.fixtures.samples import mark


def test_items_are_taken_one_by_one_and_each_batch_is_given_back_when_all_of_it_was_taken() -> None:
    """P1: in the order in which they came; an item is the next one until it is taken."""
    inbox = Inbox()
    batches = [[mark(number) for number in numbers] for numbers in ((1, 2, 3), (4,), (), (5, 6))]
    for batch in batches:
        inbox.add_batch(batch)
    found, given_back = [], []
    while (item := inbox.peek()) is not None:
        assert inbox.peek() is item
        found.append(item)
        given_back.append(inbox.take())
    assert found == [mark(number) for number in range(1, 7)]
    assert [batch for batch in given_back if batch] == [batch for batch in batches if batch]
    assert [bool(batch) for batch in given_back] == [False, False, True, True, False, True]


def test_a_wait_ends_with_an_item_or_when_somebody_ends_it() -> None:
    """What ends it is no item."""
    inbox = Inbox()
    inbox.add_batch(())
    inbox.wait(60.0)
    assert inbox.peek() is None
    inbox.add_batch([mark(1)])
    inbox.wait(60.0)
    inbox.wait(60.0)
    assert inbox.peek() == mark(1)
    inbox.take()
    inbox.wait(0.0)
    assert inbox.peek() is None
