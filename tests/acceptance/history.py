"""
What happened in a run, in the order of one oplog, and pure checks of the invariants over it.

A history is a list of facts. All of them (the test's writes, the handlers' starts and effects, and the
bridge's own state) go to one replica set, so that one change stream gives them in one order, which no
clock and no process can dispute. Each check returns sentences about what is wrong; none means good.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Written:
    """A majority write to the watched collection. `place` is the comparable part of its resume token."""

    key: str
    n: int
    place: str
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Started:
    """A handler began with a change."""

    handler: str
    key: str
    n: int
    fence: int
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Effect:
    """A handler's effect was accepted by the fenced resource."""

    handler: str
    key: str
    n: int
    fence: int
    partition: str
    place: str
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Stored:
    """
    The bridge stored a position.

    Attributes:
        where: the document: a subscription, a partition or the lease.
        place: the token; empty where only numbers were stored.
        numbers: everything there that must not go back.
        passed: for a subscription, its name: all its changes up to `place` count as done.
    """

    where: str
    place: str
    numbers: Mapping[str, int] = field(default_factory=dict)
    passed: str | None = None
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Led:
    """A listener acquired the lease."""

    listener: str
    version: int
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Dropped:
    """A person dropped the bridge's state: stored positions begin anew, versions and fences do not."""

    at: float = 0.0


Fact = Written | Started | Effect | Stored | Led | Dropped
Handlers = Mapping[str, str]
"""For each handler, the place after which changes are its own; empty for all."""


def lost(history: Sequence[Fact], handlers: Handlers) -> list[str]:
    """P1: each write after a handler's start has an accepted effect of it."""
    done = {(fact.handler, fact.key, fact.n) for fact in history if isinstance(fact, Effect)}
    return [
        f"{handler} lost {fact.key} {fact.n}"
        for handler, start in handlers.items()
        for fact in history
        if isinstance(fact, Written) and fact.place > start and (handler, fact.key, fact.n) not in done
    ]


def invented(history: Sequence[Fact]) -> list[str]:
    """P11: nothing takes effect, or starts, that was not written before."""
    written: set[tuple[str, int]] = set()
    wrong = []
    for fact in history:
        if isinstance(fact, Written):
            written.add((fact.key, fact.n))
        elif isinstance(fact, Started | Effect) and (fact.key, fact.n) not in written:
            wrong.append(f"{fact.handler} invented {fact.key} {fact.n}")
    return wrong


def out_of_order(history: Sequence[Fact]) -> list[str]:
    """P2: the accepted effects of a handler and a key never go back, and skip nothing between first and last."""
    last: dict[tuple[str, str], int] = {}
    wrong = []
    for fact in history:
        if not isinstance(fact, Effect):
            continue
        before = last.get((fact.handler, fact.key))
        if before is not None and not before <= fact.n <= before + 1:
            wrong.append(f"{fact.handler} {fact.key}: {fact.n} after {before}")
        last[fact.handler, fact.key] = fact.n
    return wrong


def stale(history: Sequence[Fact]) -> list[str]:
    """P3: within a partition no effect is accepted under a smaller fence than one before it."""
    largest: dict[str, int] = {}
    wrong = []
    for fact in history:
        if isinstance(fact, Effect):
            if fact.fence < largest.get(fact.partition, 0):
                wrong.append(f"{fact.partition}: fence {fact.fence} accepted after {largest[fact.partition]}")
            largest[fact.partition] = max(fact.fence, largest.get(fact.partition, 0))
    return wrong


def reused_fences(history: Sequence[Fact]) -> list[str]:
    """P3: two executions of one change never hold the same fence."""
    starts = Counter(fact for fact in history if isinstance(fact, Started))
    seen: dict[tuple[str, str, int, int], int] = defaultdict(int)
    for fact, count in starts.items():
        seen[fact.handler, fact.key, fact.n, fact.fence] += count
    return [f"{who} started {count} times under one fence" for who, count in seen.items() if count > 1]


def shared_versions(history: Sequence[Fact]) -> list[str]:
    """P3: no two terms have the same version, and a later term has a larger one, whatever was dropped."""
    wrong = []
    last = Led("nobody", 0)
    for fact in history:
        if isinstance(fact, Led):
            if fact.version <= last.version:
                wrong.append(f"{fact.listener} led with version {fact.version} after {last.version}")
            last = fact
    return wrong


def going_back(history: Sequence[Fact]) -> list[str]:
    """P4: versions, epochs, fences, committed sequences and stored tokens never go back."""
    numbers: dict[tuple[str, str], int] = {}
    places: dict[str, str] = {}
    wrong = []
    for fact in history:
        if isinstance(fact, Dropped):
            places.clear()
            numbers = {key: value for key, value in numbers.items() if key[1] != "committed"}
        elif isinstance(fact, Stored):
            for name, value in fact.numbers.items():
                if value < numbers.get((fact.where, name), value):
                    wrong.append(f"{fact.where}: {name} went back from {numbers[fact.where, name]} to {value}")
                numbers[fact.where, name] = value
            if fact.place and fact.place < places.get(fact.where, ""):
                wrong.append(f"{fact.where}: token went back from {places[fact.where]} to {fact.place}")
            places[fact.where] = fact.place or places.get(fact.where, "")
    return wrong


def beyond_prefix(history: Sequence[Fact], handlers: Handlers) -> list[str]:
    """P5: when a watermark is stored, every write up to its place has taken effect."""
    written = [fact for fact in history if isinstance(fact, Written)]
    done: set[tuple[str, str, int]] = set()
    wrong = []
    for fact in history:
        if isinstance(fact, Effect):
            done.add((fact.handler, fact.key, fact.n))
        elif isinstance(fact, Stored) and fact.passed is not None:
            wrong += [
                f"{fact.where} passed {write.key} {write.n} before it took effect"
                for write in written
                if handlers.get(fact.passed, "") < write.place <= fact.place
                and (fact.passed, write.key, write.n) not in done
            ]
    return wrong


def too_often(history: Sequence[Fact], faults: int = 0) -> list[str]:
    """P6: a change starts once for each handler, and at most once more for each fault."""
    starts = Counter((fact.handler, fact.key, fact.n) for fact in history if isinstance(fact, Started))
    return [f"{who} started {count} times" for who, count in starts.items() if count > 1 + faults]


def longest_gap(history: Sequence[Fact], since: float, until: float) -> float:
    """P7: the longest time without a start, between two times while writes went on, in seconds."""
    times = [fact.at for fact in history if isinstance(fact, Started) and since <= fact.at <= until]
    marks = [since, *times, until]
    return max(later - earlier for earlier, later in pairwise(marks))


def violations(history: Sequence[Fact], handlers: Handlers, *, faults: int = 0) -> list[str]:
    """Everything that is wrong with a run that has come to rest."""
    return [
        *lost(history, handlers),
        *invented(history),
        *out_of_order(history),
        *stale(history),
        *reused_fences(history),
        *shared_versions(history),
        *going_back(history),
        *beyond_prefix(history, handlers),
        *too_often(history, faults),
    ]
