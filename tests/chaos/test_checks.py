"""The checks of a run against bad histories, made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.chaos import checks
from tests.chaos.checks import Longest, Stop
from tests.chaos.facts import (
    Brought,
    Changed,
    Charged,
    Fact,
    Fault,
    Let,
    Parked,
    Waited,
)
from tests.chaos.plan import healthy_partitions
from tests.chaos.report import merged
from tests.chaos.setting import partition_of
from tests.chaos.verdict import Evidence, Judgement, judge
from tests.rig.history import Due, Effect, Led, SetAside, Started, Wrote

KEY = next(f"key-{n}" for n in range(99) if ("quick", partition_of("quick", f"key-{n}")) in healthy_partitions())
INDEX = partition_of("quick", KEY)
WHERE = ("quick", INDEX)


def wrote(n: int, at: float = 0.0, key: str = KEY) -> Wrote:
    return Wrote(key, n, f"82{n:02}", at, "quick")


def started(n: int, at: float = 0.0, fence: int = 0, key: str = KEY) -> Started:
    return Started(handler="quick", key=key, n=n, fence=fence or n, partition=INDEX, seq=n, at=at)


def effect(n: int, at: float = 0.0, fence: int = 0, key: str = KEY) -> Effect:
    return Effect(handler="quick", key=key, n=n, fence=fence or n, partition=INDEX, seq=n, at=at)


def due(n: int, key: str = KEY) -> Due:
    return Due("quick", key, n)


GOOD: list[Fact] = [
    Led("a", 1, 0.0),
    *(fact for n in (1, 2, 3) for fact in (wrote(n, n), started(n, n), effect(n, n))),
]


QUICK: dict[str, Any] = {"name": "quick", "partitions": [{"partition": 3, "state": "flowing"}]}
STATUS = {**checks.AT_REST, "handlers": [QUICK]}


def judged(facts: Sequence[Fact], *faults: Fault, acknowledged: Sequence[Due] = (), **more: Any) -> Judgement:
    """The judgement of a history of which all else is good."""
    nothing = dict.fromkeys(("troubles", "discarded", "parked", "unlike"), ())
    good = {"status": STATUS, "load": 1.0, "announced": {}, "ends": {}, "steps": 9, **nothing}
    return judge(Evidence(facts, acknowledged, faults, **{**good, **more}))


def test_a_good_history_has_nothing_wrong() -> None:
    """P1-P6: else the checks below would say little."""
    judgement = judged(GOOD, acknowledged=[due(n) for n in (1, 2, 3)], announced={1: "listener"})
    assert judgement.good, judgement.wrong
    assert judgement.counts == {
        "written": 3,
        "started": 3,
        "effects": 3,
        "set aside": 0,
        "parked": 0,
        "duplicates": 0,
        "steps of the state": 9,
    }


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
def test_what_is_spoilt_is_seen(promise: str, change: object) -> None:
    """P1-P6, P12: each promise by at least one history that breaks it."""
    assert callable(change)
    judgement = judged(change(GOOD), acknowledged=[due(n) for n in (1, 2, 3)])
    assert judgement.wrong[promise], judgement.wrong


def parking(*facts: Fact) -> list[str]:
    """Three changes of a key, the first of which has failed."""
    written = [Wrote(KEY, n, f"82{n:02}", 0.0, "parking") for n in (1, 2, 3)]
    return checks.parked([*written, *facts], {Due("parking", KEY, 2)})


def parks(n: int) -> Parked:
    return Parked(Due("parking", KEY, n))


def lets(n: int) -> Let:
    return Let(Due("parking", KEY, n))


def acts(n: int) -> Effect:
    return Effect(handler="parking", key=KEY, n=n, fence=n)


def test_parked_keys_are_released_in_order_and_by_a_person() -> None:
    """P1, P2, P12: replayed or discarded, none before another, and none left."""
    assert parking(parks(1), parks(2), parks(3), acts(1), lets(1), lets(2), acts(3), lets(3)) == []
    assert parking(parks(1), parks(2), acts(1), lets(1), acts(2), lets(2), acts(3)) == []
    assert len(parking(parks(1), acts(2))) == 2, "it overtakes, and the first one waits for ever"
    assert len(parking(parks(1), lets(1))) == 1, "nobody has discarded it"
    judgement = judged(GOOD, parked=["chaos/parking/0/1"])
    assert judgement.wrong["parked keys"] == ["a key of chaos/parking/0/1 is parked in the end"]


def test_what_the_runner_could_not_do_and_what_ended_by_itself_is_no_good_run() -> None:
    """A run that has not happened proves nothing."""
    assert not judged(GOOD, troubles=["no fault"]).good
    assert not judged(GOOD, ends={"listener-0": [1]}).good
    assert not judged(GOOD, announced={2: "listener-0"}).good
    assert not judged(GOOD, unlike=["no step explains it"]).good


KILL = Fault("kill worker", 10.0, 10.0)
POISON = "poison-1"


@pytest.mark.parametrize(
    ("facts", "wrong"),
    [
        ([wrote(1), Charged(WHERE, "", 1, 0, 5.0)], True),
        ([wrote(1), Charged(WHERE, "", 0, 1, 5.0)], True),
        ([wrote(1, 9.0), Charged(WHERE, "", 0, 1, 15.0)], False),
        ([wrote(1, 9.0), Charged(WHERE, "", 0, 2, 15.0)], True),
        ([wrote(1), wrote(2, 9.0), effect(1), Charged(WHERE, "8201", 0, 1, 15.0)], False),
        ([wrote(1, key=POISON), Charged(("quick", partition_of("quick", POISON)), "", 3, 3, 5.0)], False),
        ([wrote(1), Changed(WHERE, "halted", "8201")], True),
        ([wrote(1), Changed(WHERE, "paused")], False),
        ([wrote(1, key=POISON), Changed(("quick", partition_of("quick", POISON)), "halted", "8201")], False),
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
    assert checks.charged_innocents([wrote(1, 4), brought, halt], []) == [f"{WHERE} halted at {due(1)}"]


def test_a_document_of_a_snapshot_starts_once_more_and_takes_nothing_back() -> None:
    """P2, P6: as often as there were snapshots, and at its place: never behind what is newer."""
    again: list[Fact] = [
        Started(handler="quick", key=KEY, n=2, fence=7, partition=INDEX, seq=4, at=11),
        Effect(handler="quick", key=KEY, n=2, fence=7, partition=INDEX, seq=4, at=11),
    ]
    history: list[Fact] = [fact for n in (1, 2) for fact in (wrote(n, n), started(n, n), effect(n, n))]
    ordered = Fault("snapshot", 10, 12)
    assert checks.repeated([*history, *again], [ordered]) == (1, [])
    assert checks.repeated([*history, *again], [])[1]
    assert judged([*history, *again], ordered).wrong["out of order"] == []
    behind: list[Fact] = [wrote(3, 10.5), started(3, 10.5), effect(3, 10.5)]
    assert judged([*history, *behind, *again], ordered).wrong["out of order"]


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
    assert checks.stops(history, [WHERE], least=2) == [Stop(WHERE, 1, 5), Stop(WHERE, 20, 30)]
    assert checks.gaps(history, [WHERE], least=2) == [Stop(None, 1, 5), Stop(None, 20, 30)]
    assert checks.stops([*history, Led("a", 1, 90)], [WHERE], least=20) == [Stop(WHERE, 30, 90)]
    assert checks.stops(history, [], least=0) == checks.gaps(history, [], least=0) == []
    assert checks.gaps([wrote(1, 0), SetAside(due(1)), wrote(2, 50), effect(2, 51)], [WHERE], least=2) == []


def test_a_stop_is_judged_by_the_faults_that_befall_it() -> None:
    """P7: with an allowance for a busy machine, and for each fault."""
    short, long_ = Stop(WHERE, 5, 24), Stop(WHERE, 5, 30)
    assert checks.stopped([short], []) == []
    assert "no fault" in checks.stopped([long_], [])[0]
    assert checks.stopped([long_], [KILL]) == []
    assert checks.stopped([Stop(WHERE, 5, 60)], [KILL]) == [
        f"quick/{INDEX} stood for 55.0 s, 34.0 s allowed: kill worker",
    ]
    everything = Stop(None, 5, 23)
    assert checks.stopped([everything], []) == ["everything stood for 18.0 s, 10.0 s allowed: no fault"]
    assert checks.stopped([everything], [], load=2) == []
    assert checks.stopped([Stop(None, 5, 45)], [], load=9), "no machine is that busy"


def test_gaps_are_told_by_kind_with_what_else_was_in_force() -> None:
    """A process has a successor from the moment it dies; a server's bound counts from its return."""
    down = Fault("kill redis", 40.0, 43.0)
    assert checks.longest_gaps([Stop(None, 9, 12), Stop(None, 41, 45), Stop(None, 90, 99)], [KILL, down]) == {
        "kill worker": Longest(2),
        "kill redis": Longest(2),
    }
    beside = Fault("freeze worker", 11.0, 14.0)
    assert checks.longest_gaps([Stop(None, 9, 12)], [KILL, beside]) == {
        "kill worker": Longest(2, ("freeze worker",)),
        "freeze worker": Longest(1, ("kill worker",)),
    }


def test_a_status_is_judged_by_what_is_so() -> None:
    """P16: at rest, everything is done and nothing stands."""
    assert checks.untrue(STATUS) == []
    assert checks.untrue({**STATUS, "caught_up": False}) == ["caught_up is False"]
    halted = {**QUICK, "partitions": [{"partition": 3, "state": "halted"}]}
    assert checks.untrue({**STATUS, "handlers": [halted]}) == ["quick/3 is halted"]
    assert len(checks.untrue({})) == len(checks.AT_REST)
    assert not judged(GOOD, status={}).good


def test_the_figures_of_runs_are_added_up() -> None:
    """The table over several seeds."""
    first, second = judged(GOOD, KILL), judged(GOOD[:-1], KILL, KILL)
    total = merged([first, second])
    assert total.times == {"kill worker": 3}
    assert total.counts["written"] == 6
    assert len(total.wrong["lost"]) == len(second.wrong["lost"]) == 1
    assert not total.good
