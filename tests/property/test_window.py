"""The window against a model of ten lines."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, takewhile

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from mongo_celery.bridge.window import OVERHEAD_BYTES, Mark, PendingChange, Queue, Window, _Completed
from tests.fixtures import samples

PARTITIONS = 3
partitions = st.integers(0, PARTITIONS - 1)
SETTINGS = settings(max_examples=60, stateful_step_count=40)


def stands_in(number: int) -> bool:
    return number % 10 == 0


def token_data(number: int) -> str:
    return samples.token_data(number) + "~" * stands_in(number)


def mark(number: int) -> Mark:
    return Mark({"_data": token_data(number)}, token_data(number), samples.mark(number).cluster_time)


@dataclass
class Item:
    """Something in the stream: a change of a partition, or a place where nothing is owed."""

    number: int
    index: int | None
    size: int
    done: bool


class Model:
    """What a window is: a list of items in stream order."""

    def __init__(self) -> None:
        self.items: list[Item] = []

    def waiting(self, index: int) -> list[Item]:
        return [item for item in self.items if item.index == index and not item.done]

    @property
    def open(self) -> list[Item]:
        return [item for item in self.items if not item.done]

    @property
    def watermark(self) -> int | None:
        prefix = [item for item in takewhile(lambda item: item.done, self.items) if not stands_in(item.number)]
        return prefix[-1].number if prefix else None


class WindowMachine(RuleBasedStateMachine):
    """Reads a stream, completes partitions in any order, and compares after every step."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.window = Window()
        self.queues = [Queue() for _ in range(PARTITIONS)]
        self.number = 0

    def _next(self) -> int:
        """Places are even, so that a token may also lie between two of them."""
        self.number += 2
        return self.number

    @initialize(resumed=st.booleans())
    def begin(self, resumed: bool) -> None:
        """A term begins without a watermark, or with that of the term before."""
        if resumed:
            self.model.items.append(Item(self._next(), None, 0, done=True))
        self.window = Window(mark(self.number) if resumed else None)

    @rule(index=partitions, size=st.integers(1, 4))
    def read_a_change(self, index: int, size: int) -> None:
        number = self._next()
        assert token_data(number) > self.window.seen
        self.window.add(PendingChange(mark(number), index, b"x" * size), self.queues[index])
        self.model.items.append(Item(number, index, size, done=False))

    @rule()
    def read_a_marker(self) -> None:
        number = self._next()
        self.window.pass_over(mark(number))
        self.model.items.append(Item(number, None, 0, done=True))

    @rule(back=st.integers(0, 6))
    def read_a_place_again(self, back: int) -> None:
        """A reopened stream repeats itself; nothing that was seen is new, and passing over it does nothing."""
        number = self.number - back
        if number > 0 and self.number:
            assert token_data(number) <= self.window.seen
            self.window.pass_over(mark(number))

    @rule(index=partitions, count=st.integers(0, 4), further=st.integers(0, 1))
    def commit_a_prefix_of_a_partition(self, index: int, count: int, further: int) -> None:
        """By the token of its last change, or by one that lies between two changes."""
        finished = self.model.waiting(index)[:count]
        number = finished[-1].number + further if finished else 0
        assert self.window.complete(self.queues[index], token_data(number)) == len(finished)
        for item in finished:
            item.done = True

    @rule(index=partitions)
    def commit_past_all_that_was_read(self, index: int) -> None:
        """The state may be further than the stream: a partition that an earlier term has worked on."""
        finished = self.model.waiting(index)
        assert self.window.complete(self.queues[index], token_data(self.number + 1)) == len(finished)
        for item in finished:
            item.done = True

    @rule(index=partitions, limit=st.integers(1, 4), max_bytes=st.integers(1, 8))
    def look_at_a_head(self, index: int, limit: int, max_bytes: int) -> None:
        """In order, at least one where there is one, within both limits, and as many as fit."""
        waiting = self.model.waiting(index)
        fitting = [n for n in range(1, len(waiting) + 1) if sum(item.size for item in waiting[:n]) <= max_bytes]
        expected = waiting[: min(limit, max(fitting, default=1))]
        head = self.queues[index].head(limit, max_bytes)
        assert [entry.mark for entry in head] == [mark(item.number) for item in expected]
        assert [len(entry.raw) for entry in head] == [item.size for item in expected]

    @invariant()
    def the_watermark_is_the_end_of_the_completed_prefix(self) -> None:
        """P5: it passes nothing that is not done, and nothing that is done holds it back."""
        expected = self.model.watermark
        assert self.window.watermark == (None if expected is None else mark(expected))

    @invariant()
    def what_waits_is_counted(self) -> None:
        """The bounds of the buffers rest on these numbers."""
        assert self.window.count == len(self.model.open)
        assert self.window.size == sum(item.size + OVERHEAD_BYTES for item in self.model.open)
        assert self.window.size == sum(queue.size for queue in self.queues)
        assert [queue.first for queue in self.queues] == [next(iter(queue.head(1, 1)), None) for queue in self.queues]
        assert [len(queue) for queue in self.queues] == [len(self.model.waiting(index)) for index in range(PARTITIONS)]

    @invariant()
    def what_is_done_costs_nothing(self) -> None:
        """Markers are folded into one, and the bytes of what is done are let go."""
        order = list(self.window._order)
        assert not any(isinstance(one, _Completed) and isinstance(two, _Completed) for one, two in pairwise(order))
        assert not any(isinstance(item, PendingChange) and item.done and item.raw for item in order)
        assert not order or not order[0].done


def test_the_window_behaves_like_its_model() -> None:
    """P5, and order, counts, bytes and heads, over any interleaving of reading and committing."""
    run_state_machine_as_test(WindowMachine, settings=SETTINGS)


def test_a_change_out_of_order_is_refused() -> None:
    """P2: the reader hands over in stream order; anything else is a fault of ours."""
    window, queue = Window(), Queue()
    window.add(PendingChange(mark(2), 0, b"x"), queue)
    for number, other in ((1, queue), (2, Queue())):
        with pytest.raises(AssertionError):
            window.add(PendingChange(mark(number), 0, b"x"), other)


def test_a_blocked_partition_does_not_make_the_window_grow() -> None:
    """P5 with bounded memory: behind one change that is not done, what others have done folds together."""
    window, blocked, flowing = Window(), Queue(), Queue()
    window.add(PendingChange(mark(1), 0, b"blocked"), blocked)
    number, folds = 1, 0
    while folds < 3:  # the last thing is a fold, whose place is that of all before it
        number, before = number + 1, len(window._order)
        window.add(PendingChange(mark(number), 1, b"flows"), flowing)
        window.complete(flowing, token_data(number))
        folds += len(window._order) < before
        assert len(window._order) < 2000
    assert (window.count, window.watermark) == (1, None)
    window.complete(blocked, token_data(1))
    assert (window.watermark, window.count, window.size, len(window._order)) == (mark(number), 0, 0, 0)
