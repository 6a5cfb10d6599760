"""
Fair dispatch between the handlers of a group, which share workers.

Workers take runs roughly in the order of sending, and do not interrupt a run. If the queue had a run of each partition
of a slow handler, a fast handler in the same group would be as slow.

A handler is **long** if its runs take `LONG_SECONDS` or more on average. One rule applies to all long handlers of a
shared group together:

    They may have only a few unclaimed runs: half as many as they have running, and at least `LEAST_UNCLAIMED`. While
    quick runs wait for a worker, they may have in flight only half as many as the group has running, and at least one.

Among long handlers, the handler with the fewest runs in flight is next. Quick handlers never wait.

A run that no worker takes counts only for `PATIENCE_SECONDS`, so a queue without a worker delays no other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mongo_celery.bridge.listener.partition import Partition
    from mongo_celery.bridge.listener.subscription import Dispatch, Subscription

LONG_SECONDS = 0.2
LEAST_UNCLAIMED = 2
DELAYED_SECONDS = 0.1
CONTENTION_SECONDS = 1.0
PATIENCE_SECONDS = 5.0
_WEIGHT = 0.125


class Fairness:
    """
    The fairness of one term, used by the leading thread. The class is pure.

    Args:
        groups: the groups of every handler, by name.
        limited: handlers with a rate limit, whose runs wait for tokens, not for workers.
    """

    def __init__(self, groups: Mapping[str, str | None], limited: AbstractSet[str] = frozenset()) -> None:
        members: dict[str | None, list[str]] = {}
        for name, group in groups.items():
            members.setdefault(group, []).append(name)
        self._groups = [Group(names, limited) for names in members.values() if len(names) > 1]
        self._group_of = {name: group for group in self._groups for name in group.names}

    def note_run(self, name: str, seconds: float) -> None:
        """Note how long a handler's run has occupied its worker."""
        if name in self._group_of:
            self._group_of[name].note_run(name, seconds)

    def due(self, subscriptions: Mapping[str, Subscription], now: float) -> list[Dispatch]:
        """Return the runs to dispatch now: all due ones except those that the rule delays."""
        chosen: list[Dispatch] = []
        for name, each in subscriptions.items():
            if (each.candidates or each.has_replays) and name not in self._group_of:
                chosen += each.due(now)
        for group in self._groups:
            chosen += group.due(subscriptions, now)
        return chosen

    def next_due(self, subscriptions: Mapping[str, Subscription]) -> float:
        """Return the monotonic time at which the next run is due, without the handlers that wait for their share."""
        next_at = math.inf
        for name, each in subscriptions.items():
            if each.candidates and (name not in self._group_of or name not in self._group_of[name].held):
                next_at = min(next_at, each.next_due())
        return next_at


def make_fairness(subscriptions: Mapping[str, Subscription]) -> Fairness:
    """Return the fairness of a term for these subscriptions."""
    groups = {name: each.plan.handler.group for name, each in subscriptions.items()}
    return Fairness(groups, {name for name, each in subscriptions.items() if each.plan.token_seconds})


class Group:
    """
    The handlers of one group, two or more.

    Attributes:
        names: the handlers of the group, the most recently served ones last.
        held: long handlers whose due runs were not all sent.
    """

    def __init__(self, names: Iterable[str], limited: AbstractSet[str]) -> None:
        self.names = list(names)
        self.held: set[str] = set()
        self._limited = limited
        self._seconds: dict[str, float] = {}
        self._delayed_at = -math.inf

    def note_run(self, name: str, seconds: float) -> None:
        """Update the average time of a handler's runs, with more weight on recent ones."""
        before = self._seconds.get(name, seconds)
        self._seconds[name] = before + (seconds - before) * _WEIGHT

    def due(self, subscriptions: Mapping[str, Subscription], now: float) -> Iterator[Dispatch]:
        """Yield the runs to dispatch. Afterwards `held` is set."""
        long = {name for name in self.names if self._seconds.get(name, 0.0) >= LONG_SECONDS}
        in_flight = {name: _in_flight(subscriptions[name], now) for name in self.names} if long else {}
        for name in self.names:
            if name not in long:
                yield from subscriptions[name].due(now)
        waiting = {name: iter(subscriptions[name].due(now)) for name in self.names if name in long}
        count = {name: len(in_flight[name]) for name in waiting}
        room = self._room(long, in_flight, now)
        while room > 0 and waiting:
            name = min(waiting, key=lambda each: count[each])
            due = next(waiting[name], None)
            if due is None:
                del waiting[name]
                continue
            room -= 1
            count[name] += 1
            self.names.remove(name)
            self.names.append(name)
            yield due
        self.held = set(waiting)

    def _room(self, long: AbstractSet[str], in_flight: Mapping[str, list[Partition]], now: float) -> int:
        """Return the number of further runs that the long handlers may have in flight."""
        running = {name: sum(map(_is_running, each)) for name, each in in_flight.items()}
        count, executed = (sum(len(in_flight[name]) for name in long), sum(running[name] for name in long))
        room = max(LEAST_UNCLAIMED, executed // 2) - (count - executed)
        quick = in_flight.keys() - long - self._limited
        if any(_waiting_seconds(each, now) >= DELAYED_SECONDS for name in quick for each in in_flight[name]):
            self._delayed_at = now
        if now - self._delayed_at <= CONTENTION_SECONDS:
            room = min(room, max(sum(running.values()) // 2, 1) - count)
        return room


def _in_flight(subscription: Subscription, now: float) -> list[Partition]:
    """Return the partitions whose run in flight has a worker, or will soon have one."""
    return [
        each
        for each in subscription.in_flight
        if _is_running(each) or 0 <= _waiting_seconds(each, now) < PATIENCE_SECONDS
    ]


def _is_running(partition: Partition) -> bool:
    """Return True if a worker is executing the run in flight. A handled run has left its worker."""
    return partition.image.live and partition.image.handled is None


def _waiting_seconds(partition: Partition, now: float) -> float:
    """Return the seconds that the run in flight has waited for a worker. Negative if it is not waiting."""
    run = partition.in_flight
    return now - run.sent_at if run is not None and partition.is_unclaimed else -1.0
