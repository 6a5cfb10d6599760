"""
What happened to changes on their way through chains, and pure judgements of it.

Beside `history.py`, which judges by the order of the oplog, this one knows the numbers that a partition gives,
and counts spare starts for each change, since here single changes are hit by single faults.

A history is what writers wrote, what handlers recorded when they started, and the effects that the fenced
sink accepted, in the order in which it accepted them. Each checker returns sentences, one for each
violation; none means that the property holds. `tests/unit/test_chain_history.py` gives each of them bad
histories.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple


class Item(NamedTuple):
    """One change as its writer knows it: the handler it is for, its document's key, its number for that key."""

    handler: str
    key: str
    n: int


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a handler; `at` is monotonic time in nanoseconds, the same clock in every process."""

    item: Item
    partition: int
    seq: int
    fence: int
    at: int
    retries: int = 0
    pid: int = 0


@dataclass(frozen=True, slots=True)
class Effect:
    """One write that the sink of a handler's partition accepted."""

    item: Item
    partition: int
    seq: int
    fence: int


@dataclass(frozen=True, slots=True)
class History:
    """
    What is judged.

    Attributes:
        written: what was written, in order for each key.
        starts: in any order.
        effects: in the order in which they were accepted, for each handler and partition.
        set_aside: changes with a dead letter, or skipped, or ignored by their handler.
    """

    written: tuple[Item, ...] = ()
    starts: tuple[Start, ...] = ()
    effects: tuple[Effect, ...] = ()
    set_aside: frozenset[Item] = frozenset()


def violations(history: History, *, spare: Mapping[Item, int] | int = 0) -> list[str]:
    """
    All violations of P1 to P4 and P6.

    Args:
        spare: how many starts beyond the first a change may have, for retries that it asked for and faults
            that hit its partition; one number for all changes, or one for each that may have any.
    """
    return [
        *lost(history),
        *phantoms(history),
        *out_of_order(history),
        *stale_accepted(history),
        *weak_tokens(history),
        *restarted(history, spare),
    ]


def lost(history: History) -> list[str]:
    """P1: every written change has an accepted effect or was set aside."""
    done = {effect.item for effect in history.effects} | history.set_aside
    return [f"lost: {item}" for item in history.written if item not in done]


def phantoms(history: History) -> list[str]:
    """P11: nothing starts and nothing has an effect that was not written."""
    written = set(history.written)
    facts: list[Start | Effect] = [*history.starts, *history.effects]
    return [f"never written: {fact}" for fact in facts if fact.item not in written]


def out_of_order(history: History) -> list[str]:
    """
    P2: accepted effects of a partition never go back, nor do those of a key.

    A run of several changes that was cut by a crash is repeated from its beginning, under a larger token:
    that is the one way back.
    """
    found = []
    for effects in _by_partition(history.effects):
        newest: dict[str, int] = {}
        firsts: dict[int, int] = {}
        before: Effect | None = None
        for effect in effects:
            firsts.setdefault(effect.fence, effect.seq)
            if before is not None and before.fence < effect.fence and firsts[before.fence] <= effect.seq < before.seq:
                newest.clear()
            elif before is not None and effect.seq < before.seq:
                found.append(f"went back: {effect} after {before}")
            if effect.item.n < newest.get(effect.item.key, effect.item.n):
                found.append(f"went back for its key: {effect}")
            newest[effect.item.key] = max(effect.item.n, newest.get(effect.item.key, effect.item.n))
            before = effect
    return found


def stale_accepted(history: History) -> list[str]:
    """P3: the sink accepted nothing under a smaller token than it had seen."""
    return [
        f"stale write accepted: {b} after {a}"
        for effects in _by_partition(history.effects)
        for a, b in pairwise(effects)
        if b.fence < a.fence
    ]


def weak_tokens(history: History) -> list[str]:
    """P4: each execution has a token of its own, larger than those of all that began before it; a run shares one."""
    found = []
    partitions: dict[tuple[str, int], list[Start]] = defaultdict(list)
    for start in history.starts:
        partitions[start.item.handler, start.partition].append(start)
    for starts in partitions.values():
        for (seq, fence), count in Counter((start.seq, start.fence) for start in starts).items():
            if count > 1:
                found.append(f"{count} starts of {starts[0].item.handler} number {seq} shared token {fence}")
        firsts: dict[int, int] = {}
        for start in starts:
            firsts[start.fence] = min(start.seq, firsts.get(start.fence, start.seq))
        for (a, before), (b, after) in pairwise(sorted(firsts.items())):
            if after < before:
                found.append(f"{starts[0].item.handler}: token {b} began at {after}, {a} had begun at {before}")
    return found


def restarted(history: History, spare: Mapping[Item, int] | int = 0) -> list[str]:
    """P6: a handler starts once for a change, and at most as often again as `spare` allows."""
    found = []
    for item, count in Counter(start.item for start in history.starts).items():
        allowed = 1 + (spare if isinstance(spare, int) else spare.get(item, 0))
        if count > allowed:
            found.append(f"{item} started {count} times, {allowed} allowed")
    return found


def started_in_order(history: History) -> list[str]:
    """P2, without faults: handlers of a partition start in the order of their numbers."""
    first: dict[tuple[str, int], dict[int, int]] = defaultdict(dict)
    for start in sorted(history.starts, key=lambda start: start.at):
        first[start.item.handler, start.partition].setdefault(start.seq, start.at)
    return [
        f"{handler} partition {partition}: number {b} started before {a}"
        for (handler, partition), times in first.items()
        for a, b in pairwise(sorted(times))
        if times[b] < times[a]
    ]


def _by_partition(effects: Iterable[Effect]) -> Iterable[list[Effect]]:
    found: dict[tuple[str, int], list[Effect]] = defaultdict(list)
    for effect in effects:
        found[effect.item.handler, effect.partition].append(effect)
    return found.values()
