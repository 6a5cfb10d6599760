"""
Fair dispatch between the subscriptions of a group, whose runs are taken by the same workers.

Workers take runs about in the order in which they were sent, and a run that has begun is not interrupted. So a handler
that takes a second would drag a no-op beside it to its own speed, with one run a partition in front of each of that
one's. What was sent cannot be recalled: fairness is decided at dispatch, by what looks at the partitions show.

- Only **long** subscriptions are ever held back: those whose runs have taken `LONG_SECONDS` or more on average.
  What is quick leaves its slot at once, and a group with one subscription has nobody to be fair to.
- **Slots**, how many runs workers execute at a time, are not known to a listener. They are estimated as the most
  claims that were seen to be live at once in the last seconds in which somebody waited: only then were all in use.
- All long runs of a group that are out are few more than there are slots. The rest would but wait in front of others.
- While somebody quicker is **delayed**, with a run that has waited for `DELAYED_SECONDS`, all that are slower come
  down, within seconds, to their share of the slots: by number of subscriptions, rounded down, one at least. For every
  `EASING_SECONDS` without a delay they get one more; so slots that nobody else needs do not stay idle for long.
- Among those that share, who was served least, in seconds of slots, is next.

A run that nobody takes counts for `PATIENCE_SECONDS` only, so that queues without a worker hold back nobody else.

Not promised: an exact share where there are fewer slots than subscriptions; anything of runs that were sent before
their handler was known to be slow; anything between groups, which are for workers of their own, or for handlers with a
rate limit, of which nobody can tell what their runs wait for.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mongo_celery.bridge.listener.dispatcher import Dispatch
    from mongo_celery.bridge.listener.subscription import Subscription
    from mongo_celery.bridge.listener.tracker import Tracker

    Due = tuple[Tracker, Dispatch]

LONG_SECONDS = 0.2
DELAYED_SECONDS = 0.1
EASING_SECONDS = 10.0
PATIENCE_SECONDS = 5.0
_SLOWER = 2.0  # so many times as long as the quickest that is delayed at times
_ACTIVE_SECONDS = 2.0
_LOAD_HALF_LIFE = 10.0
_EXCESS_HALF_LIFE = 0.5
_SECONDS_KEPT = 10
_RUNS_KEPT = 16
_LEAST_AHEAD = 2


class Fairness:
    """
    The fairness of one term. Pure; used by the leading thread.

    Args:
        groups: of every subscription, by name.
        limited: subscriptions whose task has a rate limit.
    """

    def __init__(self, groups: Mapping[str, str | None], limited: AbstractSet[str] = frozenset()) -> None:
        members: dict[str | None, list[str]] = {}
        for name, group in groups.items():
            members.setdefault(group, []).append(name)
        self._groups = [Group(names, limited) for names in members.values() if len(names) > 1]
        self._shared = {name for group in self._groups for name in group.paces}

    def observe(self, subscriptions: Mapping[str, Subscription], read_at: float) -> None:
        """Take in what was seen of all that is out, by a reading that began at this monotonic time."""
        for group in self._groups:
            group.observe(subscriptions, read_at)

    def due(self, subscriptions: Mapping[str, Subscription], now: float) -> list[Due]:
        """Runs to dispatch now: all that are due, but for those of long subscriptions that have their share."""
        chosen = [pair for name, each in subscriptions.items() if name not in self._shared for pair in each.due(now)]
        for group in self._groups:
            chosen += group.due(subscriptions, now)
        return chosen

    def next_due(self, subscriptions: Mapping[str, Subscription]) -> float:
        """Monotonic time at which the next waiting run becomes ready; who has its share waits for a look instead."""
        held = {name for group in self._groups for name in group.held}
        return min((each.next_due() for name, each in subscriptions.items() if name not in held), default=math.inf)


@dataclass(slots=True)
class Pace:
    """
    How a subscription runs.

    Attributes:
        seconds: how long one of its runs takes, on average of the last ones that ended.
        load: seconds of slots that it used, counted less the longer ago.
        running: since when the runs are seen that are executed, by partition.
        fences: of its partitions at the last look; one is larger after each run that was taken.
        ended: how many of its runs were seen to end.
        active_at: monotonic time at which something of it was last seen to be out.
        delayed_at: when a run of it was last seen to be delayed.
    """

    seconds: float = 0.0
    load: float = 0.0
    running: dict[int, float] = field(default_factory=dict)
    fences: dict[int, int] = field(default_factory=dict)
    ended: int = 0
    active_at: float = -math.inf
    delayed_at: float = -math.inf

    @property
    def is_long(self) -> bool:
        """Whether its runs keep a slot from others."""
        return self.seconds >= LONG_SECONDS

    def observe(self, subscription: Subscription, read_at: float, elapsed: float) -> bool:
        """Take in a look, so many seconds after the one before; whether a run of it is delayed."""
        before, self.running = self.running, {}
        is_delayed = False
        for index, tracker in subscription.trackers.items():
            fence = tracker.image.fence
            is_another = fence != self.fences.get(index, fence)
            self.fences[index] = fence
            since = before.get(index)
            if tracker.outstanding is not None:
                self.active_at = read_at
                is_delayed = is_delayed or DELAYED_SECONDS <= _waiting(tracker, read_at) < PATIENCE_SECONDS
            is_running = _runs(tracker)
            if is_running:
                self.running[index] = read_at if since is None or is_another else since
            if since is not None and (is_another or not is_running):
                self._end(read_at - since)
            elif since is None and is_another and not is_running:  # between two looks
                self._end(0.0)
        fading = 0.5 ** (elapsed / _LOAD_HALF_LIFE)
        self.load = self.load * fading + elapsed * sum(since < read_at for since in self.running.values())
        return is_delayed

    def _end(self, seconds: float) -> None:
        self.ended += 1
        self.seconds += (seconds - self.seconds) / min(self.ended, _RUNS_KEPT)


class Slots:
    """How many runs workers execute at a time, from what was seen in seconds in which all of them were busy."""

    def __init__(self) -> None:
        self._most: deque[tuple[int, int]] = deque(maxlen=_SECONDS_KEPT)

    @property
    def count(self) -> int:
        """The most that were seen in more than one second: a look is no snapshot, and may count one too many."""
        most = sorted((count for _, count in self._most), reverse=True)
        return most[min(1, len(most) - 1)] if most else 0

    def note(self, running: int, read_at: float, *, all_busy: bool) -> None:
        """So many ran at once. Where not all slots were busy this says only that there are no fewer."""
        if not all_busy and running <= self.count:
            return
        second = int(read_at)
        if self._most and self._most[-1][0] == second:
            running = max(running, self._most.pop()[1])
        self._most.append((second, running))


class Group:
    """
    The subscriptions of one group, two or more.

    Attributes:
        paces: of all of them, by name.
        held: those that have their share.
    """

    def __init__(self, names: Iterable[str], limited: AbstractSet[str]) -> None:
        self.paces = {name: Pace() for name in names}
        self.held: set[str] = set()
        self._limited = limited
        self._slots = Slots()
        self._read_at: float | None = None
        self._slower: set[str] = set()
        self._allowed = math.inf  # runs of all slower ones together

    def observe(self, subscriptions: Mapping[str, Subscription], read_at: float) -> None:
        """Take in a look at all that is out."""
        elapsed = read_at - self._read_at if self._read_at is not None else 0.0
        self._read_at = read_at
        delayed = {name for name, pace in self.paces.items() if pace.observe(subscriptions[name], read_at, elapsed)}
        delayed -= self._limited
        for name in delayed:
            self.paces[name].delayed_at = read_at
        running = sum(len(pace.running) for pace in self.paces.values())
        if running:
            self._slots.note(running, read_at, all_busy=bool(delayed))
        self._weigh(delayed, read_at, elapsed)

    def due(self, subscriptions: Mapping[str, Subscription], now: float) -> Iterator[Due]:
        """What is to be dispatched; when it has ended, `held` are those that may have more."""
        self.held.clear()
        long = {name: pace for name, pace in self.paces.items() if pace.is_long}
        for name in self.paces.keys() - long.keys():
            yield from subscriptions[name].due(now)
        if not long:
            return
        waiting = {name: iter(subscriptions[name].due(now)) for name in long}
        out = {name: _out(subscriptions[name], now) for name in long}
        while sum(out.values()) < self._most:
            has_room = sum(out.get(name, 0) for name in self._slower) < int(min(self._allowed, self._most))
            able = [name for name in waiting if has_room or name not in self._slower]
            if not able:
                break
            name = min(able, key=lambda each: (long[each].load + out[each] * long[each].seconds, each))
            pair = next(waiting[name], None)
            if pair is None:
                del waiting[name]
            else:
                out[name] += 1
                yield pair
        self.held.update(waiting)

    @property
    def _most(self) -> int:
        """How many long runs may be out: so many that no slot waits for the listener."""
        return self._slots.count + max(_LEAST_AHEAD, self._slots.count // 2)

    def _weigh(self, delayed: AbstractSet[str], read_at: float, elapsed: float) -> None:
        """Find who is slower than somebody that is delayed at times, and how many runs of theirs may be out."""
        active = {name: pace for name, pace in self.paces.items() if read_at - pace.active_at < _ACTIVE_SECONDS}
        others = {name: pace for name, pace in active.items() if pace.delayed_at > -math.inf}
        quickest = min((pace.seconds for pace in others.values()), default=math.inf)
        self._slower = {name for name, pace in self.paces.items() if pace.is_long and pace.seconds > _SLOWER * quickest}
        needy = others.keys() - self._slower
        if not self._slower or not needy:
            self._allowed = math.inf
            return
        sharing = len(self._slower & active.keys()) or 1
        share = max(1, self._slots.count * sharing // (sharing + len(needy)))
        excess = max(min(self._allowed, self._most) - share, 0)
        if needy & delayed:
            self._allowed = share + excess * 0.5 ** (elapsed / _EXCESS_HALF_LIFE)
        else:
            self._allowed = share + excess + elapsed / EASING_SECONDS


def _runs(tracker: Tracker) -> bool:
    """Whether a worker executes the run that is out; one that is handled has left its slot."""
    return tracker.outstanding is not None and tracker.image.live and tracker.image.handled is None


def _waiting(tracker: Tracker, now: float) -> float:
    """Seconds for which the run that is out has waited for a worker."""
    run = tracker.outstanding
    return now - run.sent_at if run is not None and tracker.is_awaited else 0.0


def _out(subscription: Subscription, now: float) -> int:
    """How many of a subscription's runs have a slot, or wait for one and will get it."""
    return sum(
        _runs(tracker) or (tracker.is_awaited and _waiting(tracker, now) < PATIENCE_SECONDS)
        for tracker in subscription.outstanding
    )
