"""The checks of a run against bad histories, made by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.chaos import checks
from tests.chaos.checks import Evidence, Judgement, Stop, judge
from tests.chaos.facts import Brought, Changed, Charged, Fact, Waited
from tests.chaos.faults import Fault
from tests.chaos.plan import healthy_partitions
from tests.chaos.setting import partition_of
from tests.rig.history import Due, Effect, Led, SetAside, Started, Wrote

KEY = next(f"key-{n}" for n in range(99) if ("quick", partition_of("quick", f"key-{n}")) in healthy_partitions())
INDEX = partition_of("quick", KEY)
WHERE = ("quick", INDEX)
KILL, POISON = Fault("kill worker", 10.0, 10.0), "poison-1"
POISONED = ("quick", partition_of("quick", POISON))
QUICK: dict[str, Any] = {"name": "quick", "partitions": [{"partition": 3, "state": "flowing"}]}
STATUS = {**checks.AT_REST, "handlers": [QUICK]}


def wrote(n: int, at: float = 0.0, key: str = KEY) -> Wrote:
    return Wrote(key, n, f"82{n:02}", at, "quick")


def started(n: int, at: float = 0.0, fence: int = 0, seq: int = 0) -> Started:
    return Started(handler="quick", key=KEY, n=n, fence=fence or n, partition=INDEX, seq=seq or n, at=at)


def effect(n: int, at: float = 0.0, fence: int = 0, seq: int = 0) -> Effect:
    return Effect(handler="quick", key=KEY, n=n, fence=fence or n, partition=INDEX, seq=seq or n, at=at)


def due(n: int, key: str = KEY) -> Due:
    return Due("quick", key, n)


def handled(*numbers: int) -> list[Fact]:
    return [fact for n in numbers for fact in (wrote(n, n), started(n, n), effect(n, n))]


GOOD: list[Fact] = [Led("a", 1, 0.0), *handled(1, 2, 3)]


def judged(facts: Sequence[Fact], *faults: Fault, **more: Any) -> Judgement:
    """The judgement of a history of which all else is good."""
    return judge(Evidence(**{"history": facts, "faults": faults, "status": STATUS, **more}))


def test_a_good_history_has_nothing_wrong() -> None:
    """P1-P6: else the checks below would say little."""
    judgement = judged(GOOD, acknowledged=[due(n) for n in (1, 2, 3)], announced={1: "listener"})
    assert judgement.good, judgement.wrong
    assert [judgement.counts[each] for each in ("written", "started", "effects", "duplicates")] == [3, 3, 3, 0]


@pytest.mark.parametrize(
    ("promise", "change"),
    [
        ("lost", lambda facts: [fact for fact in facts if fact != effect(2, 2)]),
        ("lost", lambda facts: [fact for fact in facts if fact != wrote(2, 2)]),
        ("invented", lambda facts: [*facts, started(9)]),
        ("out of order", lambda facts: [*facts, effect(2, 4, fence=4)]),
        ("stale", lambda facts: [*facts, wrote(4), effect(4, fence=1)]),
        ("stale", lambda facts: [*facts, started(3, fence=3)]),
        ("innocents charged", lambda facts: [*facts, wrote(4), SetAside(due(4))]),
        ("repeated too often", lambda facts: [*facts, started(3, 9, fence=9)]),
        ("healthy partitions stopped", lambda facts: [*facts, wrote(4, 10), started(4, 99), effect(4, 99)]),
        ("healthy partitions stopped", lambda facts: [*facts, wrote(4, 10), Led("a", 2, 99)]),
    ],
)
def test_what_is_spoilt_is_seen(promise: str, change: Callable[[list[Fact]], list[Fact]]) -> None:
    """P1-P6, P12: each promise by at least one history that breaks it."""
    judgement = judged(change(GOOD), acknowledged=[due(n) for n in (1, 2, 3)])
    assert judgement.wrong[promise], judgement.wrong


@pytest.mark.parametrize(
    "more",
    [
        {"troubles": ["no fault"]},
        {"ends": {"listener-0": [1]}},
        {"announced": {2: "listener-0"}},
        {"unlike": ["no step explains it"]},
        {"parked": ["chaos/parking/0/1"]},
        {"status": {}},
        {"status": {**STATUS, "caught_up": False}},
        {"status": {**STATUS, "handlers": [{**QUICK, "partitions": [{"partition": 3, "state": "halted"}]}]}},
    ],
    ids=str,
)
def test_a_run_is_not_good_whose_end_is_not(more: dict[str, Any]) -> None:
    """P16 and others: a runner's trouble, a listener that ended, a status that is not so."""
    assert not judged(GOOD, **more).good


@pytest.mark.parametrize(
    ("facts", "wrong"),
    [
        ([wrote(1), Charged(WHERE, "", 1, 0, 5.0)], True),
        ([wrote(1), Charged(WHERE, "", 0, 1, 5.0)], True),
        ([wrote(1, 9.0), Charged(WHERE, "", 0, 1, 15.0)], False),
        ([wrote(1, 9.0), Charged(WHERE, "", 0, 2, 15.0)], True),
        ([wrote(1), wrote(2, 9.0), effect(1), Charged(WHERE, "8201", 0, 1, 15.0)], False),
        ([wrote(1, key=POISON), Charged(POISONED, "", 3, 3, 5.0)], False),
        ([wrote(1), Changed(WHERE, "halted", "8201")], True),
        ([wrote(1), Changed(WHERE, "paused")], False),
        ([wrote(1, key=POISON), Changed(POISONED, "halted", "8201")], False),
        ([wrote(1, key=POISON), SetAside(due(1, POISON))], False),
        ([wrote(1), SetAside(due(1))], True),
    ],
)
def test_only_poison_and_its_victims_are_charged(facts: Sequence[Fact], wrong: bool) -> None:
    """P14."""
    assert bool(checks.charged_innocents(facts, [KILL])) is wrong


def test_a_document_of_a_snapshot_is_charged_itself_and_not_what_lies_behind_it() -> None:
    """P14: its place is between those of the changes; the next change may have been written long after the kill."""
    later = wrote(3, 90)
    charge = Charged(WHERE, "8201", 0, 1, at=15.0)
    brought = Brought(WHERE, due(1), "8201~1", 5.0)
    assert checks.charged_innocents([wrote(1, 4), charge, later], [KILL])
    assert checks.charged_innocents([wrote(1, 4), charge, brought, later], [KILL]) == []
    halt = Changed(WHERE, "halted", "8201~1")
    assert checks.charged_innocents([wrote(1, 4), brought, halt], [])


def test_a_document_of_a_snapshot_starts_once_more_and_takes_nothing_back() -> None:
    """P2, P6: as often as there were snapshots, and at its place: never behind what is newer."""
    again: list[Fact] = [started(2, 11, fence=7, seq=4), effect(2, 11, fence=7, seq=4)]
    history, ordered = handled(1, 2), Fault("snapshot", 10, 12)
    assert checks.repeated([*history, *again], [ordered]) == (1, [])
    assert checks.repeated([*history, *again], [])[1]
    assert judged([*history, *again], ordered).wrong["out of order"] == []
    assert judged([*history, *handled(3), *again], ordered).wrong["out of order"]


def test_a_fault_that_lasts_may_meet_several_attempts_of_a_change() -> None:
    """P6: as many as have said that they wait, and none where there was no fault, or in another partition."""
    outage = Fault("state commands fail", 3.0, 9.0)
    history: list[Fact] = [wrote(1, 2), *(started(1, at, fence=at) for at in (3, 4, 6, 10))]
    waited: list[Fact] = [Waited(WHERE, at) for at in (3.5, 5.0)]
    elsewhere: list[Fact] = [Waited(("quick", INDEX + 1), at) for at in (3.5, 5.0)]
    assert checks.repeated([*history, *waited], [outage]) == (3, [])
    assert checks.repeated([*history, *waited[1:]], [outage])[1]
    assert checks.repeated([*history, *elsewhere], [outage])[1]
    assert checks.repeated([*history, *waited], [])[1]


def test_a_stop_is_time_in_which_something_waits_and_nothing_goes_on() -> None:
    """P7, P12: from the write where nothing waited, else from the last start or effect; also one that never ends."""
    history: list[Fact] = [wrote(1, 0), started(1, 1), effect(1, 5), wrote(2, 20), wrote(3, 21), effect(2, 30)]
    both = [Stop(where, *times) for where in (None, WHERE) for times in ((1, 5), (20, 30))]
    assert checks.find_stops(history, [WHERE], least=2) == both
    assert Stop(WHERE, 30, 90) in checks.find_stops([*history, Led("a", 1, 90)], [WHERE], least=20)
    assert checks.find_stops(history, [], least=0) == []
    aside: list[Fact] = [wrote(1, 0), SetAside(due(1)), wrote(2, 50), effect(2, 51)]
    assert checks.find_stops(aside, [WHERE], least=2) == []


def test_a_stop_is_judged_by_the_faults_that_befall_it() -> None:
    """P7: with an allowance for a busy machine, and for each fault."""
    assert checks.stopped([Stop(WHERE, 5, 24)], []) == []
    assert checks.stopped([Stop(WHERE, 5, 30)], [])
    assert checks.stopped([Stop(WHERE, 5, 30)], [KILL]) == []
    assert checks.stopped([Stop(WHERE, 5, 60)], [KILL])
    assert checks.stopped([Stop(None, 5, 23)], [])
    assert checks.stopped([Stop(None, 5, 23)], [], load=2) == []
    assert checks.stopped([Stop(None, 5, 45)], [], load=9), "no machine is that busy"
