"""
Pure checks of a run, beside those that every history has (`tests.rig.history`).

Each returns sentences about what is wrong; none means good. Whatever is judged by time is judged with an allowance,
since a machine may be busy; everything else is judged as it is. `tests/chaos/test_checks.py` gives them bad histories,
and `--broken all` builds with one rule broken.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tests.chaos.facts import (
    Brought,
    Changed,
    Charged,
    Fact,
    Let,
    Parked,
    Waited,
    Where,
)
from tests.chaos.faults import Fault
from tests.chaos.plan import healthy_partitions
from tests.chaos.setting import FLOWS, is_poison, partition_of
from tests.rig import history as common
from tests.rig.history import Due, Effect, Led, SetAside, Started, Wrote

SLACK_SECONDS = 20.0
FACTOR = 2.0
_STRIKES = 2
"""
What a partition may stand for: so many seconds on an idle machine, and so many times the bounds of the faults that
befall it. Faults follow each other closely, but more than two of them rarely strike the same change.
"""

_LOAD_MAX = 3.0


class Stop(NamedTuple):
    """A time in which something waited and nothing went on: in a partition, or in all."""

    where: Where | None
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


def not_found(history: Sequence[Fact], acknowledged: Iterable[Due]) -> list[str]:
    """What the writer's server has acknowledged is in the history, once."""
    found = Counter(Due(fact.handler or "", fact.key, fact.n) for fact in history if isinstance(fact, Wrote))
    twice = [f"{due} is in the oplog {count} times" for due, count in found.items() if count > 1]
    return [*(f"{due} was acknowledged and is not in the oplog" for due in acknowledged if due not in found), *twice]


def charged_innocents(history: Sequence[Fact], faults: Sequence[Fault]) -> list[str]:
    """
    P14: no retry, halt or dead letter of a change that was not poisoned; a crash only where a fault or a poison killed.

    A claim that lapses is charged before its owner can say that it lives, so crashes are allowed for whatever happened
    meanwhile; what they lead to is not.
    """
    changes = _Heads(history)
    deaths = sorted(fact.at for fact in history if isinstance(fact, Started) and is_poison(fact.key))
    wrong = []
    for fact in history:
        if isinstance(fact, SetAside) and not is_poison(fact.due.key):
            wrong.append(f"{fact.due} was set aside")
        elif isinstance(fact, Changed) and fact.state == "halted":
            head = changes.at(fact.where, fact.head)
            if head is None or not is_poison(head.key):
                wrong.append(f"{fact.where} halted at {head}")
        elif isinstance(fact, Charged):
            head = changes.after(fact.where, fact.place)
            if head is None or is_poison(head.key):
                continue
            if fact.retries:
                wrong.append(f"{head} was charged {fact.retries} retries")
            near = sum(fault.begin <= fact.at and changes.written_at(head) <= fault.until for fault in faults)
            near += sum(changes.written_at(head) <= each <= fact.at for each in deaths)
            if fact.crashes > near:
                wrong.append(f"{head} was charged {fact.crashes} crashes beside {near} faults")
    return wrong


class _Heads:
    def __init__(self, history: Sequence[Fact]) -> None:
        self._at: dict[Where, dict[str, Due]] = defaultdict(dict)
        self._times: dict[Due, float] = {}
        for fact in history:
            if isinstance(fact, Wrote) and fact.handler is not None:
                due = Due(fact.handler, fact.key, fact.n)
                self._at[fact.handler, partition_of(fact.handler, fact.key)][fact.place] = due
                self._times[due] = fact.at
            elif isinstance(fact, Brought):
                self._at[fact.where][fact.place] = fact.due

    def at(self, where: Where, place: str) -> Due | None:
        return self._at[where].get(place)

    def after(self, where: Where, place: str) -> Due | None:
        """The first change after a place; a document that a snapshot has brought is one."""
        found = self._at[where]
        first = min((each for each in found if each > place), default=None)
        return None if first is None else found[first]

    def written_at(self, due: Due) -> float:
        return self._times[due]


def find_stops(history: Sequence[Fact], places: Collection[Where], *, least: float) -> list[Stop]:
    """The times, of so many seconds at least, in which one of these partitions had something to do, or all had."""
    waiting = {where: _Waiting(where) for where in (None, *places)}
    for fact in history:
        if isinstance(fact, Wrote | Started | Effect | SetAside | Parked):
            due = _due(fact)
            where = due.handler, partition_of(due.handler, due.key)
            if where in waiting:
                waiting[where].take(fact, due)
            if where in waiting or not isinstance(fact, Wrote):
                waiting[None].take(fact, due)
    last = max((getattr(fact, "at", 0.0) for fact in history), default=0.0)
    return [stop for each in waiting.values() for stop in each.ended(last) if stop.seconds >= least]


class _Waiting:
    """What waits in a partition, or anywhere, and since when nothing has gone on."""

    def __init__(self, where: Where | None) -> None:
        self._where = where
        self._dues: set[Due] = set()
        self._since = 0.0
        self._stops: list[Stop] = []

    def take(self, fact: Wrote | Started | Effect | SetAside | Parked, due: Due) -> None:
        """A fact of what is waited for. That a change was set aside has no time of its own: the next fact has."""
        if isinstance(fact, SetAside | Parked):
            self._dues.discard(due)
            return
        if isinstance(fact, Started | Effect) or not self._dues:
            self._go_on(fact.at)
        if isinstance(fact, Wrote):
            self._dues.add(due)
        elif isinstance(fact, Effect):
            self._dues.discard(due)

    def ended(self, at: float) -> list[Stop]:
        self._go_on(at)
        return self._stops

    def _go_on(self, at: float) -> None:
        if self._dues:
            self._stops.append(Stop(self._where, self._since, at))
        self._since = at


def _due(fact: Wrote | Started | Effect | SetAside | Parked) -> Due:
    return Due(fact.handler or "", fact.key, fact.n) if isinstance(fact, Wrote) else fact.due


def stopped(found: Iterable[Stop], faults: Sequence[Fault], load: float = 1.0) -> list[str]:
    """
    P7, P12: nothing stands for longer than the faults that befall it explain, with an allowance; everything least.

    Args:
        found: stops of partitions, or of all.
        load: how many processes wanted each core of the machine.
    """
    wrong = []
    for stop in found:
        near = overlapping(stop, faults)
        strikes, share = (_STRIKES, 1.0) if stop.where is not None else (1, 0.5)
        bounds = sorted((fault.kind.bound for fault in near), reverse=True)[:strikes]
        lasted = sum(fault.end - fault.begin for fault in near if not fault.kind.has_successor)
        allowed = share * (SLACK_SECONDS * min(load, _LOAD_MAX) + FACTOR * sum(bounds)) + lasted
        if stop.seconds > allowed:
            names = ", ".join(fault.name for fault in near) or "no fault"
            what = f"{stop.where[0]}/{stop.where[1]}" if stop.where is not None else "everything"
            wrong.append(f"{what} stood for {stop.seconds:.1f} s, {allowed:.1f} s allowed: {names}")
    return wrong


def overlapping(stop: Stop, faults: Iterable[Fault]) -> list[Fault]:
    return [fault for fault in faults if fault.begin <= stop.end and stop.begin <= fault.until]


def repeated(history: Sequence[Fact], faults: Sequence[Fault]) -> tuple[int, list[str]]:
    """
    P6: how many starts were repetitions; a change may start once, and once more for each fault meanwhile.

    A fault that lasts may meet one attempt after another: each of those has told the state that it waits.
    """
    written = _Heads(history)
    waits = [fact for fact in history if isinstance(fact, Waited)]
    starts: dict[Due, list[Started]] = defaultdict(list)
    replayed = {fact.due for fact in history if isinstance(fact, Parked)}  # as often as a person asks
    for fact in history:
        if isinstance(fact, Started) and fact.due not in replayed:
            starts[fact.due].append(fact)
    wrong = []
    for due, each in starts.items():
        if len(each) > 1 and not is_poison(due.key):
            since, until = written.written_at(due), each[-1].at
            where = due.handler, partition_of(due.handler, due.key)
            near = sum(f.begin <= until and since <= f.until for f in faults)
            met = sum(fact.where == where and since <= fact.at <= until for fact in waits) if near else 0
            if len(each) > 1 + near + met:
                wrong.append(f"{due} started {len(each)} times beside {near} faults; {met} have said that they wait")
    return sum(len(each) - 1 for due, each in starts.items() if not is_poison(due.key)), wrong


def parked(history: Sequence[Fact], discarded: Collection[Due]) -> list[str]:
    """
    P1, P2, P12: of keys that are parked nothing overtakes, nothing goes but by a replay or a person, and none waits on.

    Args:
        discarded: what a person has told to discard; some of it may have been replayed before.
    """
    wrong = []
    open_: dict[tuple[str, str], set[int]] = defaultdict(set)
    waiting: dict[Due, None] = {}
    for fact in history:
        if isinstance(fact, Wrote) and fact.handler is not None and FLOWS[fact.handler].parks:
            open_[fact.handler, fact.key].add(fact.n)
        elif isinstance(fact, Parked):
            waiting[fact.due] = None
        elif isinstance(fact, Effect) and FLOWS[fact.handler].parks:
            left = open_[fact.handler, fact.key]
            if left and min(left) < fact.n:
                wrong.append(f"{fact.due} took effect before {min(left)} of its key was done")
            left.discard(fact.n)
        elif isinstance(fact, Let):
            waiting.pop(fact.due, None)
            left = open_[fact.due.handler, fact.due.key]
            if fact.due.n in left and fact.due not in discarded:
                wrong.append(f"the letter of {fact.due} is gone, and it was neither replayed nor discarded")
            left.discard(fact.due.n)
    return [*wrong, *(f"{due} waits for its key for ever" for due in waiting)]


def phantom_terms(history: Sequence[Fact], announced: Mapping[int, str]) -> list[str]:
    """P3: whoever says that it leads has the lease by a majority: no election takes it back."""
    had = {fact.version for fact in history if isinstance(fact, Led)}
    return [
        f"{who} led with version {version}, which nobody has"
        for version, who in announced.items()
        if version not in had
    ]


AT_REST: Mapping[str, Any] = {"state": "leading", "caught_up": True, "in_flight": 0, "buffered": 0}


def untrue(status: Mapping[str, Any]) -> list[str]:
    """P16: what status says of a bridge that has come to rest, and of its partitions."""
    wrong = [f"{name} is {status.get(name)!r}" for name, value in AT_REST.items() if status.get(name) != value]
    return wrong + [
        f"{handler['name']}/{each['partition']} is {each['state']}"
        for handler in status.get("handlers", ())
        for each in handler["partitions"]
        if each["state"] != "flowing"
    ]


_LEAST_STOP = 0.5


@dataclass(frozen=True, slots=True)
class Judgement:
    """
    The verdict on a run.

    Attributes:
        wrong: for each promise what is wrong, a sentence each.
        counts: how many writes, starts, effects, repeated starts, faults and changes without an effect.
    """

    wrong: Mapping[str, Sequence[str]]
    counts: Mapping[str, int]

    @property
    def good(self) -> bool:
        return not any(self.wrong.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """
    What there is to judge.

    Attributes:
        acknowledged: what the writer knows to be written.
        load: how many processes wanted each core of the machine.
        announced: by versions, who has said that it leads with them.
        ends: by names, how listeners have ended that nobody had ended.
        troubles: what the runner itself could not do.
        unlike: writes of the bridge's state that the models do not allow; ``steps``: how many others there were.
    """

    history: Sequence[Fact]
    acknowledged: Sequence[Due] = ()
    faults: Sequence[Fault] = ()
    status: Mapping[str, Any]
    load: float = 1.0
    announced: Mapping[int, str] = field(default_factory=dict)
    ends: Mapping[str, Sequence[int]] = field(default_factory=dict)
    troubles: Sequence[str] = ()
    discarded: Collection[Due] = ()
    parked: Sequence[str] = ()
    unlike: Sequence[str] = ()
    steps: int = 0


def judge(evidence: Evidence) -> Judgement:
    """Judge a run that has come to rest, or has not within its time: then what is missing counts as lost."""
    history, faults = evidence.history, evidence.faults
    shared: list[common.Fact] = [fact for fact in history if isinstance(fact, common.Fact)]
    gone: list[common.Fact] = [SetAside(fact.due) for fact in history if isinstance(fact, Let)]
    parking = [fact for fact in shared if isinstance(fact, Effect) and FLOWS[fact.handler].parks]
    repeats, too_often = repeated(history, faults)
    stops = find_stops(history, healthy_partitions(), least=_LEAST_STOP)
    wrong = {
        "lost": [*not_found(history, evidence.acknowledged), *common.lost([*shared, *gone])],
        "invented": common.invented(shared),
        "out of order": [*common.out_of_sequence(shared), *common.went_back(parking)],
        "parked keys": [
            *parked(history, evidence.discarded),
            *(f"a key of {where} is parked in the end" for where in evidence.parked),
        ],
        "stale": [*common.stale(shared), *common.weak_tokens(shared)],
        "unlike the models": list(evidence.unlike),
        "leases": phantom_terms(history, evidence.announced),
        "innocents charged": charged_innocents(history, faults),
        "healthy partitions stopped": stopped(stops, faults, evidence.load),
        "repeated too often": too_often,
        "listeners ended": [f"{name} ended with {ends}" for name, ends in evidence.ends.items()],
        "status": untrue(evidence.status),
        "the run itself": list(evidence.troubles),
    }
    kinds = {"written": Wrote, "started": Started, "effects": Effect, "set aside": SetAside, "parked": Parked}
    counts = {name: sum(isinstance(fact, kind) for fact in history) for name, kind in kinds.items()}
    more = {"duplicates": repeats, "faults": len(faults), "steps of the state": evidence.steps}
    return Judgement(wrong, {**counts, **more})
