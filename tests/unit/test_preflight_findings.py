"""The judgements of the preflight that need no server, and that nothing shows credentials."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from bson import Timestamp
from celery import Celery
from kombu import Queue

from mongo_celery import Bridge, Change
from mongo_celery.bridge.operations import broker_check, mongodb_check
from mongo_celery.bridge.operations.broker_check import judge_workers
from mongo_celery.bridge.operations.mongodb_check import judge_sources
from mongo_celery.bridge.stream.source import Source
from mongo_celery.bridge.wiring import BRIDGES
from mongo_celery.broker import server_check
from mongo_celery.broker.workers import WorkerReplies
from mongo_celery.command_line import CommandLine
from mongo_celery.findings import Finding
from mongo_celery.mongo.oplog import Oplog

HOUR = 3600
LINE = CommandLine("shop")
QUEUES = ["shop.0", "shop.1"]
NEEDED = ["shop.changes.summarise", "mongo_celery.commit"]


Judged = Callable[[Any], Finding | Iterable[Finding]]


def handle(change: Change) -> None:
    """A handler with a limit."""


def wait(change: Change) -> None:
    """A handler without one."""


def window(hours_and_fill: tuple[int, float | None]) -> Finding:
    hours, fill = hours_and_fill
    return mongodb_check._judge_window(Oplog(Timestamp(1000, 1), Timestamp(1000 + hours * HOUR, 1)), fill)


@pytest.mark.parametrize(
    ("judge", "fact", "levels"),
    [
        *(
            (server_check.judge_eviction, policy, [level])
            for policy, level in (("noeviction", "ok"), ("allkeys-lru", "failing"), (None, "degraded"))
        ),
        *((broker_check.judge_prefetch, depth, [level]) for depth, level in ((4, "ok"), (0, "degraded"))),
        (broker_check.judge_prefetch, 64, ["degraded"]),
        (broker_check.judge_content, ["application/json", "msgpack"], ["ok"]),
        (broker_check.judge_content, ["json", "pickle"], ["failing"]),
        (broker_check.judge_content, ["pickle"], ["failing", "failing"]),
        (broker_check.judge_content, ["yaml"], ["failing"]),
        # The oplog of a young cluster reaches back to its beginning, which says nothing.
        *((window, fact, ["ok"]) for fact in ((48, 1.0), (2, 0.1))),
        *((window, fact, ["degraded"]) for fact in ((2, 1.0), (2, None))),
    ],
)
def test_a_setting_that_loses_time_or_messages_is_a_finding(judge: Judged, fact: Any, levels: list[str]) -> None:
    """Redis that evicts throws messages away, a deep prefetch costs time, and pickle runs code in workers."""
    found = judge(fact)
    assert [each.severity for each in ([found] if isinstance(found, Finding) else found)] == levels
    assert [server_check.judge_persistence(is_kept=kept).severity for kept in (True, False)] == ["ok", "degraded"]


GROUPS = {"shop.0": ["quick"], "shop.slow.0": ["slow"]}


@pytest.mark.parametrize(
    ("consumed", "known", "needed", "wrong", "words"),
    [
        ({"a@x": [*QUEUES, "celery"]}, {"a@x": [*NEEDED, "add"]}, None, {}, ""),
        ({"a@x": ["shop.0"]}, {"a@x": NEEDED}, None, {"consumers": "failing"}, "shop.1"),
        # A busy worker is late with one of its answers; nothing is known of its queues.
        ({}, {"late@x": NEEDED}, None, {"consumers": "degraded"}, "late@x"),
        # A worker of another app on the same broker is none of our business.
        (
            {"a@x": QUEUES, "other@x": ["celery"]}, {"a@x": NEEDED[:1], "other@x": ["add"]}, None,
            {"worker_tasks": "failing"}, "mongo_celery.commit",
        ),
        # What is never sent to its queues a worker does not lack.
        (
            {"a@x": ["shop.0"], "b@x": ["shop.slow.0"]}, {"a@x": ["quick"], "b@x": ["quick"]}, GROUPS,
            {"worker_tasks": "failing"}, "slow",
        ),
        ({}, {}, None, {"no_worker": "degraded"}, ""),  # a preflight may run before them
    ],
    ids=["all is well", "a queue without a consumer", "late", "another app", "groups", "none"],
)  # fmt: skip
def test_workers_are_judged_by_what_is_sent_to_their_queues(
    consumed: dict[str, list[str]], known: dict[str, list[str]], needed: Any, wrong: dict[str, str], words: str
) -> None:
    queues, tasks = ({worker: set(each) for worker, each in of.items()} for of in (consumed, known))
    replies = WorkerReplies(queues, tasks)
    _, found = judge_workers(needed or dict.fromkeys(QUEUES, NEEDED), replies, LINE)
    assert {each.code: each.severity for each in found if each.severity != "ok"} == wrong
    assert all(words in each.sentence and "other@x" not in each.sentence for each in found if each.severity != "ok")


ORDERS = Source("shop", "orders")
THERE = {"shop": {"orders": {"type": "collection"}, "ordres_view": {"type": "view"}}}


@pytest.mark.parametrize(
    ("sources", "level"),
    [
        ([ORDERS, Source("shop", None), Source(None, None)], "ok"),
        ([Source("shop", "ordesr")], "degraded"),
        ([Source("shpo", None)], "degraded"),
        ([Source("shop", "ordres_view")], "failing"),
    ],
)
def test_a_source_that_does_not_exist_is_told(sources: list[Source], level: str) -> None:
    """It may be on its way; a view never has changes. Very many are counted."""
    (finding,) = judge_sources({"record": sources}, THERE)
    assert (finding.code, finding.severity) == ("sources", level)
    many = {f"handler_{number}": [Source("shop", f"kind_{number}")] for number in range(200)}
    assert len(list(judge_sources(many, {"shop": {}}))) == 4


@pytest.mark.parametrize(
    ("url", "hosts"),
    [
        ("mongodb://localhost:27017,127.0.0.1/?replicaSet=rs0", []),
        ("mongodb://u:p@db1.example:27017,localhost/x?replicaSet=rs0", ["db1.example"]),
        ("mongodb+srv://cluster.example/?tls=false", ["cluster.example"]),
        ("mongodb://[fd00::1]:27017/", ["fd00::1"]),
        ("mongodb://%2Ftmp%2Fmongodb-27017.sock/", []),
        ("redis://:secret@cache.example:6379/0", ["cache.example"]),
        ("rediss://cache.example:6379/0", []),
        ("amqp://guest@rabbit.example//", ["rabbit.example"]),
        ("memory://", []),
    ],
)
def test_plain_text_to_another_machine_is_seen_in_a_url(url: str, hosts: list[str]) -> None:
    """Loopback and sockets stay on this machine. Only transports that are known to be plain are judged."""
    assert mongodb_check.find_plain_hosts(url) == hosts


QUORUM = {"x-queue-type": "quorum"}


@pytest.mark.parametrize(
    ("settings", "queues"),
    [
        ({"task_queues": [Queue("shop.0", queue_arguments={"x-queue-type": "classic"}), Queue("shop.1")]}, []),
        ({"task_default_queue_type": "quorum"}, ["celery"]),
        (
            {"task_queues": [Queue("mails", queue_arguments=QUORUM)], "task_create_missing_queue_type": "quorum"},
            [*QUEUES, "mails"],
        ),
    ],
)
def test_quorum_queues_are_seen_in_the_settings(settings: dict[str, Any], queues: list[str]) -> None:
    """The bridge's, named or made by Celery itself, then the others; and no queue is made known by looking."""
    app = Celery("shop", broker="amqp://rabbit.example//", set_as_current=False)
    app.conf.update(settings)
    known = set(app.amqp.queues)
    assert broker_check.quorum_queues(app, QUEUES) == queues
    assert set(app.amqp.queues) == known


BOUNDED = {"confirm_publish": True, "read_timeout": 5, "write_timeout": 5}


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        (BOUNDED, ()),
        ({}, ("confirm_publish", "read_timeout", "write_timeout")),
        ({"confirm_publish": False, "read_timeout": 5}, ("confirm_publish", "write_timeout")),
        ({**BOUNDED, "write_timeout": None}, ("write_timeout",)),
    ],
)
def test_quorum_queues_need_confirmations_and_an_end_of_the_wait_for_them(
    given: dict[str, Any], missing: tuple[str, ...]
) -> None:
    """Nobody hears of what RabbitMQ refuses during an election; or a caller may wait for ever for an answer."""
    found = broker_check.judge_confirms(["shop.0", "mails"], QUEUES, given)
    assert found.severity == ("degraded" if missing else "ok")
    assert all(option in found.sentence for option in missing)


def test_time_limits_names_the_handlers_of_users_only() -> None:
    """The deliveries of an outbox are no function of the user, and take no option."""
    app = Celery("shop", broker="memory://")
    bridge = Bridge(app, "mongodb://localhost/?replicaSet=rs0")
    bridge.outbox("shop.orders")
    bridge.on_change("shop.orders", name="quick", time_limit=5)(handle)
    app.finalize()
    (wiring,) = BRIDGES.of(app)
    assert broker_check.check_time_limits(wiring).severity == "ok"

    bridge.on_change("shop.orders", name="endless")(wait)
    assert "endless" in broker_check.check_time_limits(wiring).sentence
