"""
What happened in a run, and pure checks of the guarantees over it.

A history is a list of facts in the order in which they happened, best that of one oplog, which no clock and no
process can dispute. Where an order is not known, writes stand before the starts, and starts before the effects.
Each check returns sentences about what is wrong; none means good. A check has nothing to say of facts that are not
there. `tests/unit/test_history.py` gives each of them bad histories.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple, TypeVar


class Due(NamedTuple):
    """One change for one handler: its document's key, and the number that grows with each write of the key."""

    handler: str
    key: str
    n: int


@dataclass(frozen=True, slots=True)
class Wrote:
    """
    A majority write to a watched collection.

    Attributes:
        place: the comparable part of its resume token.
        handler: the only one whose change it is; None for that of every handler.
    """

    key: str
    n: int
    place: str = ""
    at: float = 0.0
    handler: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _OfChange:
    """
    What a handler did with a change.

    Attributes:
        fence: the token under which it did.
        partition: in which tokens grow, as long as its partitioning lasts.
        seq: the number of the change in its partition; None where it is not known.
        at: in the unit of the history's clock.
    """

    handler: str
    key: str
    n: int
    fence: int = 0
    partition: int = 0
    partitioning: int = 0
    seq: int | None = None
    at: float = 0.0

    @property
    def due(self) -> Due:
        return Due(self.handler, self.key, self.n)


@dataclass(frozen=True, slots=True, kw_only=True)
class Started(_OfChange):
    """A handler began with a change."""

    retries: int = 0
    pid: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect(_OfChange):
    """A handler's effect was accepted by what it writes to."""


@dataclass(frozen=True, slots=True)
class SetAside:
    """A change needs no effect: it has a dead letter, was skipped, or was ignored by its handler."""

    due: Due


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
    listener: str
    version: int
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Dropped:
    """A person dropped the bridge's state: stored positions begin anew, versions and fences do not."""

    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Kept:
    """A handler's change, by its place, is stored in the state database: it holds no watermark any more."""

    handler: str
    place: str


Fact = Wrote | Started | Effect | SetAside | Stored | Led | Dropped | Kept

Handlers = Mapping[str, str]
"""For each handler the place after which changes are its own; empty for all."""

NONE: Handlers = MappingProxyType({})
"""For histories in which each write names its handler."""


def violations(history: Sequence[Fact], handlers: Handlers = NONE, *, spare: Mapping[Due, int] | int = 0) -> list[str]:
    """
    Everything that is wrong with a run that has come to rest.

    Args:
        handlers: those that must handle every write that names none.
        spare: how many starts beyond the first a change may have, for retries that it asked for and faults that hit
            it; one number for all changes, or one for each that may have any.
    """
    return [
        *lost(history, handlers),
        *invented(history),
        *out_of_order(history),
        *stale(history),
        *weak_tokens(history),
        *shared_versions(history),
        *going_back(history),
        *beyond_prefix(history, handlers),
        *too_often(history, spare),
    ]


def lost(history: Sequence[Fact], handlers: Handlers = NONE) -> list[str]:
    """P1: each change has an accepted effect or was set aside."""
    return [f"{due.handler} lost {due.key} {due.n}" for due in missing(history, handlers, Effect)]


def missing(history: Sequence[Fact], handlers: Handlers, kind: type[Started | Effect]) -> list[Due]:
    there = {fact.due for fact in history if isinstance(fact, (kind, SetAside))}
    return [due for due, _ in _owed(history, handlers) if due not in there]


def invented(history: Sequence[Fact]) -> list[str]:
    """P11: nothing takes effect, or starts, that was not written before."""
    written: set[Due | tuple[str, int]] = set()
    wrong = []
    for fact in history:
        if isinstance(fact, Wrote):
            written.add((fact.key, fact.n) if fact.handler is None else Due(fact.handler, fact.key, fact.n))
        elif isinstance(fact, Started | Effect) and not written & {fact.due, (fact.key, fact.n)}:
            what = "started" if isinstance(fact, Started) else "had an effect of"
            wrong.append(f"{fact.handler} {what} {fact.key} {fact.n}, which nobody wrote")
    return wrong


def out_of_order(history: Sequence[Fact]) -> list[str]:
    """P2: accepted effects are in order, by their numbers in the partition or, where these are not known, by key."""
    by_key = [fact for fact in history if isinstance(fact, Effect) and fact.seq is None]
    return [*out_of_sequence(history), *went_back(by_key), *skipped(by_key)]


def went_back(history: Sequence[Fact]) -> list[str]:
    """P2: the accepted effects of a handler and a key never go back."""
    return [
        f"the effect of {effect.handler} on {effect.key} went back from {newest} to {effect.n}"
        for effect, newest in _backward(fact for fact in history if isinstance(fact, Effect))
    ]


def skipped(history: Sequence[Fact]) -> list[str]:
    """P2: the accepted effects of a handler and a key leave nothing out between the first and the last."""
    last: dict[tuple[str, str], int] = {}
    wrong = []
    for fact in history:
        if isinstance(fact, Effect):
            before = last.get((fact.handler, fact.key), fact.n)
            if fact.n > before + 1:
                wrong.append(f"the effects of {fact.handler} on {fact.key} skipped from {before} to {fact.n}")
            last[fact.handler, fact.key] = fact.n
    return wrong


def out_of_sequence(history: Sequence[Fact]) -> list[str]:
    """
    P2: accepted effects of a partition never go back by their numbers, nor do those of a key.

    A run of several changes that was cut by a crash is repeated from what is recorded of it, under a larger token:
    that is the one way back.
    """
    wrong = []
    for effects in _by_partition(fact for fact in history if isinstance(fact, Effect)):
        newest: dict[str, int] = {}
        firsts: dict[int, int] = {}
        before: Effect | None = None
        for effect in (each for each in effects if each.seq is not None):
            seq = effect.seq or 0
            firsts.setdefault(effect.fence, seq)
            last = seq if before is None else before.seq or 0
            if before is not None and before.fence < effect.fence and firsts[before.fence] <= seq < last:
                newest.clear()
            elif seq < last:
                wrong.append(f"{effect.due} as number {seq} went back after {last}")
            if effect.n < newest.get(effect.key, effect.n):
                wrong.append(f"{effect.due} went back for its key")
            newest[effect.key] = max(effect.n, newest.get(effect.key, effect.n))
            before = effect
    return wrong


def started_out_of_sequence(history: Sequence[Fact]) -> list[str]:
    """P2, without faults: handlers of a partition start in the order of their numbers."""
    first: dict[tuple[str, int], dict[int, float]] = defaultdict(dict)
    for start in sorted((fact for fact in history if isinstance(fact, Started)), key=lambda start: start.at):
        if start.seq is not None:
            first[start.handler, start.partition].setdefault(start.seq, start.at)
    return [
        f"{handler} partition {partition}: number {b} started before {a}"
        for (handler, partition), times in first.items()
        for a, b in pairwise(sorted(times))
        if times[b] < times[a]
    ]


def stale(history: Sequence[Fact]) -> list[str]:
    """P3: within a partition no effect is accepted under a smaller token than one before it."""
    wrong = []
    for effects in _by_partition(fact for fact in history if isinstance(fact, Effect)):
        largest = 0
        for effect in effects:
            if effect.fence < largest:
                wrong.append(f"{effect.due}: token {effect.fence} accepted after {largest}")
            largest = max(largest, effect.fence)
    return wrong


def weak_tokens(history: Sequence[Fact]) -> list[str]:
    """P3, P4: two executions of a change never share a token, and later changes have larger ones; a run shares one."""
    wrong = []
    for starts in _by_partition(fact for fact in history if isinstance(fact, Started)):
        counts = Counter(((each.key, each.n) if each.seq is None else each.seq, each.fence) for each in starts)
        for (which, fence), count in counts.items():
            if count > 1:
                wrong.append(f"{starts[0].handler}: {count} starts of {which} under one token, {fence}")
        firsts: dict[int, int] = {}
        for start in starts:
            if start.seq is not None:
                firsts[start.fence] = min(start.seq, firsts.get(start.fence, start.seq))
        for (a, before), (b, after) in pairwise(sorted(firsts.items())):
            if after < before:
                wrong.append(f"{starts[0].handler}: token {b} began at {after}, {a} had begun at {before}")
    return wrong


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


def beyond_prefix(history: Sequence[Fact], handlers: Handlers = NONE) -> list[str]:
    """P5: when a watermark is stored, every change up to its place has taken effect, is set aside, or is stored."""
    owed = list(_owed(history, handlers))
    done: set[Due] = set()
    kept: set[tuple[str, str]] = set()
    wrong = []
    for fact in history:
        if isinstance(fact, Effect | SetAside):
            done.add(fact.due)
        elif isinstance(fact, Kept):
            kept.add((fact.handler, fact.place))
        elif isinstance(fact, Stored) and fact.passed is not None:
            wrong += [
                f"{fact.where} passed {due.key} {due.n} before it took effect"
                for due, write in owed
                if due.handler == fact.passed
                and write.place <= fact.place
                and due not in done
                and (due.handler, write.place) not in kept
            ]
    return wrong


def too_often(history: Sequence[Fact], spare: Mapping[Due, int] | int = 0) -> list[str]:
    """P6: a handler starts once for a change, and at most as often again as is spared."""
    wrong = []
    for due, count in Counter(fact.due for fact in history if isinstance(fact, Started)).items():
        allowed = 1 + (spare if isinstance(spare, int) else spare.get(due, 0))
        if count > allowed:
            wrong.append(f"{due} started {count} times, {allowed} allowed")
    return wrong


def longest_gap(history: Sequence[Fact], since: float, until: float) -> float:
    """P7: the longest time without a start, between two times while writes went on."""
    times = [fact.at for fact in history if isinstance(fact, Started) and since <= fact.at <= until]
    marks = [since, *times, until]
    return max(later - earlier for earlier, later in pairwise(marks))


def _owed(history: Sequence[Fact], handlers: Handlers) -> Iterator[tuple[Due, Wrote]]:
    for fact in history:
        if isinstance(fact, Wrote):
            if fact.handler is not None:
                yield Due(fact.handler, fact.key, fact.n), fact
            else:
                for handler, start in handlers.items():
                    if fact.place > start:
                        yield Due(handler, fact.key, fact.n), fact


F = TypeVar("F", Started, Effect)


def _by_partition(facts: Iterable[F]) -> Iterable[list[F]]:
    found: dict[tuple[str, int, int], list[F]] = defaultdict(list)
    for fact in facts:
        found[fact.handler, fact.partitioning, fact.partition].append(fact)
    return found.values()


def _backward(facts: Iterable[F]) -> Iterator[tuple[F, int]]:
    """Those with a smaller number than one before of their handler and key, and that number."""
    newest: dict[tuple[str, str], int] = {}
    for fact in facts:
        place = fact.handler, fact.key
        if fact.n < newest.get(place, fact.n):
            yield fact, newest[place]
        newest[place] = max(fact.n, newest.get(place, fact.n))
