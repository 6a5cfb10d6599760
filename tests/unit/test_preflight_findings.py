"""The judgements of the preflight that need no server, and that nothing shows credentials."""

from __future__ import annotations

from typing import Any

import pytest
from bson import Timestamp
from celery import Celery
from kombu import Queue
from pymongo.errors import AutoReconnect, OperationFailure

from mongo_celery.bridge.operations import broker_check, mongodb_check
from mongo_celery.bridge.operations.broker_check import judge_workers
from mongo_celery.bridge.operations.mongodb_check import judge_sources
from mongo_celery.bridge.stream.source import Source
from mongo_celery.broker import server_check
from mongo_celery.broker.workers import WorkerReplies
from mongo_celery.command_line import CommandLine
from mongo_celery.errors import AccessError, ServerUnavailableError
from mongo_celery.mongo.opening import to_user_error
from mongo_celery.mongo.oplog import Oplog
from mongo_celery.mongo.redaction import short, without_credentials
from mongo_celery.mongo.verdicts import ErrorContext

HOUR = 3600
LINE = CommandLine("shop")
QUEUES = ["shop.0", "shop.1"]
NEEDED = ["shop.changes.summarise", "mongo_celery.commit"]


@pytest.mark.parametrize(
    ("policy", "level"),
    [("noeviction", "ok"), ("allkeys-lru", "failing"), ("volatile-ttl", "failing"), (None, "degraded")],
)
def test_only_noeviction_keeps_queued_tasks(policy: str | None, level: str) -> None:
    """Under every other policy Redis throws messages away."""
    assert server_check.judge_eviction(policy).severity == level


@pytest.mark.parametrize(("is_kept", "severity"), [(True, "ok"), (False, "degraded")])
def test_a_redis_without_persistence_is_told(is_kept: bool, severity: str) -> None:
    """The bridge survives it; other tasks do not."""
    assert server_check.judge_persistence(is_kept=is_kept).severity == severity


@pytest.mark.parametrize(("multiplier", "level"), [(1, "ok"), (4, "ok"), (0, "degraded"), (64, "degraded")])
def test_a_deep_prefetch_is_told(multiplier: int, level: str) -> None:
    """It costs time, not order."""
    assert broker_check.judge_prefetch(multiplier).severity == level


@pytest.mark.parametrize(
    ("accepted", "levels"),
    [
        (["json"], ["ok"]),
        (["application/json", "msgpack"], ["ok"]),
        (["json", "pickle"], ["failing"]),
        (["pickle"], ["failing", "failing"]),
        (["yaml"], ["failing"]),
    ],
)
def test_pickle_and_the_lack_of_json_are_errors(accepted: list[str], levels: list[str]) -> None:
    """Whoever may write to the broker must not run code in workers."""
    assert [finding.severity for finding in broker_check.judge_content(accepted)] == levels


GROUPS = {"shop.0": ["quick"], "shop.slow.0": ["slow"]}


@pytest.mark.parametrize(
    ("consumed", "known", "needed", "wrong", "words"),
    [
        ({"a@x": [*QUEUES, "celery"]}, {"a@x": [*NEEDED, "add"]}, None, {}, ""),
        ({"a@x": ["shop.0"]}, {"a@x": NEEDED}, None, {"consumers": "failing"}, "consumes the queues shop.1."),
        # A busy worker is late with one of its answers; nothing is known of its queues.
        ({}, {"late@x": NEEDED}, None, {"consumers": "degraded"}, "late@x"),
        # A worker of another app on the same broker is none of our business.
        (
            {"a@x": QUEUES, "other@x": ["celery"]}, {"a@x": NEEDED[:1], "other@x": ["add"]}, None,
            {"worker_tasks": "failing"}, "a@x does not have the tasks mongo_celery.commit",
        ),
        # What is never sent to its queues a worker does not lack.
        (
            {"a@x": ["shop.0"], "b@x": ["shop.slow.0"]}, {"a@x": ["quick"], "b@x": ["quick"]}, GROUPS,
            {"worker_tasks": "failing"}, "b@x does not have the tasks slow",
        ),
        ({}, {}, None, {"no_worker": "degraded"}, ""),  # a preflight may run before them
    ],
    ids=["all is well", "a queue without a consumer", "late", "another app", "groups", "none"],
)  # fmt: skip
def test_workers_are_judged_by_what_is_sent_to_their_queues(
    consumed: dict[str, list[str]], known: dict[str, list[str]], needed: Any, wrong: dict[str, str], words: str
) -> None:
    """P16: each finding about them, and no other."""
    queues, tasks = ({worker: set(each) for worker, each in of.items()} for of in (consumed, known))
    replies = WorkerReplies(queues, tasks)
    _, found = judge_workers(needed or dict.fromkeys(QUEUES, NEEDED), replies, LINE)
    assert {each.code: each.severity for each in found if each.severity != "ok"} == wrong
    assert all(words in each.sentence and "other@x" not in each.sentence for each in found if each.severity != "ok")


ORDERS = Source("shop", "orders")
THERE = {"shop": {"orders": {"type": "collection"}, "ordres_view": {"type": "view"}}}


@pytest.mark.parametrize(
    ("sources", "level", "words"),
    [
        ([ORDERS, Source("shop", None), Source(None, None)], "ok", "exist"),
        ([Source("shop", "ordesr")], "degraded", "record listens to shop.ordesr, which does not exist (did you mean"),
        ([Source("shpo", None)], "degraded", "shpo.*, which does not exist. It gets no changes"),
        ([Source("shop", "ordres_view")], "failing", "which is a view"),
    ],
)
def test_a_source_that_does_not_exist_is_told(sources: list[Source], level: str, words: str) -> None:
    """It may be on its way; a view never has changes."""
    (finding,) = judge_sources({"record": sources}, THERE)
    assert (finding.code, finding.severity) == ("sources", level)
    assert words in finding.sentence


def test_very_many_sources_that_do_not_exist_are_counted() -> None:
    """As in a database that is new."""
    wanted = {f"handler_{number}": [Source("shop", f"kind_{number}")] for number in range(200)}
    found = list(judge_sources(wanted, {"shop": {}}))
    assert len(found) == 4
    assert found[-1].sentence.startswith("197 more")


@pytest.mark.parametrize(
    ("hours", "fill", "level"),
    [(48, 1.0, "ok"), (2, 1.0, "degraded"), (2, 0.1, "ok"), (2, None, "degraded")],
)
def test_a_small_oplog_window_is_told_once_the_oplog_is_full(hours: int, fill: float | None, level: str) -> None:
    """The oplog of a young cluster reaches back to its beginning, which says nothing."""
    oplog = Oplog(Timestamp(1000, 1), Timestamp(1000 + hours * HOUR, 1))
    assert mongodb_check._judge_window(oplog, fill).severity == level


@pytest.mark.parametrize(
    ("url", "hosts"),
    [
        ("mongodb://localhost:27017,127.0.0.1/?replicaSet=rs0", []),
        ("mongodb://u:p@db1.example:27017,localhost/x?replicaSet=rs0", ["db1.example"]),
        ("mongodb://db1.example/?tls=true", []),
        ("mongodb://db1.example/?ssl=true", []),
        ("mongodb+srv://cluster.example/", []),
        ("mongodb+srv://cluster.example/?tls=false", ["cluster.example"]),
        ("mongodb://[::1]:27017/", []),
        ("mongodb://[fd00::1]:27017/", ["fd00::1"]),
        ("mongodb://%2Ftmp%2Fmongodb-27017.sock/", []),
    ],
)
def test_plain_text_to_another_machine_is_seen_in_a_mongodb_url(url: str, hosts: list[str]) -> None:
    """Loopback and sockets stay on this machine."""
    assert mongodb_check.find_plain_hosts(url) == hosts


@pytest.mark.parametrize(
    ("url", "hosts"),
    [
        ("redis://localhost:6379/0", []),
        ("redis://:secret@cache.example:6379/0", ["cache.example"]),
        ("rediss://cache.example:6379/0", []),
        ("amqp://guest@rabbit.example//", ["rabbit.example"]),
        ("amqps://rabbit.example//", []),
        ("memory://", []),
        ("redis+socket:///tmp/redis.sock", []),
    ],
)
def test_plain_text_to_another_machine_is_seen_in_a_broker_url(url: str, hosts: list[str]) -> None:
    """Only transports that are known to be plain are judged."""
    assert mongodb_check.find_plain_hosts(url) == hosts


@pytest.mark.parametrize(
    "text",
    [
        "cannot reach mongodb://u:secret@db.example/x",
        "mongodb://u:se/secret@db.example/ is not valid",
        'Bad database name "secret@host/"',
        "redis://:secret@cache.example:6379/0 and amqp://u:secret@rabbit.example//",
    ],
)
def test_no_text_shows_credentials(text: str) -> None:
    """Also not the part that a driver takes for something else because the password is not escaped."""
    shown = without_credentials(text)
    assert "secret" not in shown
    assert "***@" in shown


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (AutoReconnect("connection closed"), ServerUnavailableError),
        (OperationFailure("Authentication failed.", 18), AccessError),
        (OperationFailure("not authorized", 13), AccessError),
        (OperationFailure("odd", 4242), OperationFailure),
    ],
)
def test_an_operators_error_is_one_of_ours_where_there_is_a_cure(failure: Any, kind: type[Exception]) -> None:
    """An error that nobody has met keeps its own name."""
    assert type(to_user_error(failure, ErrorContext("the state", "readWrite"))) is kind


def test_a_short_error_ends_before_what_the_driver_appends() -> None:
    """Topology descriptions fill a screen and help nobody at a prompt."""
    text = "one:1: refused (configured timeouts: connectTimeoutMS: 20.0ms), Timeout: 4s, Topology Description: <...>"
    assert short(AutoReconnect(text)) == "one:1: refused"


QUORUM = {"x-queue-type": "quorum"}
BOUNDED = {"confirm_publish": True, "read_timeout": 5, "write_timeout": 5}


def of_rabbit(settings: dict[str, Any]) -> Celery:
    app = Celery("shop", broker="amqp://rabbit.example//", set_as_current=False)
    app.conf.update(settings)
    return app


@pytest.mark.parametrize(
    ("settings", "queues"),
    [
        ({}, []),
        ({"task_create_missing_queue_type": "quorum"}, QUEUES),
        ({"task_queues": [Queue("shop.0", queue_arguments=QUORUM)]}, ["shop.0"]),
        ({"task_queues": [Queue("shop.0", queue_arguments={"x-queue-type": "classic"}), Queue("shop.1")]}, []),
        ({"task_default_queue_type": "quorum"}, ["celery"]),
        ({"task_queues": [Queue("mails", queue_arguments=QUORUM)]}, ["mails"]),
        (
            {"task_queues": [Queue("mails", queue_arguments=QUORUM)], "task_create_missing_queue_type": "quorum"},
            [*QUEUES, "mails"],
        ),
    ],
)
def test_quorum_queues_are_seen_in_the_settings(settings: dict[str, Any], queues: list[str]) -> None:
    """The bridge's, named or made by Celery itself, then the others; and no queue is made known by looking."""
    app = of_rabbit(settings)
    known = set(app.amqp.queues)

    assert broker_check.quorum_queues(app, QUEUES) == queues
    assert set(app.amqp.queues) == known


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        (BOUNDED, None),
        ({}, "confirm_publish, read_timeout, write_timeout"),
        ({"confirm_publish": False, "read_timeout": 5}, "confirm_publish, write_timeout"),
        ({"confirm_publish": True}, "read_timeout, write_timeout"),
        ({**BOUNDED, "write_timeout": None}, "write_timeout"),
    ],
)
def test_quorum_queues_need_confirmations_and_an_end_of_the_wait_for_them(
    given: dict[str, Any], missing: str | None
) -> None:
    """Nobody hears of what RabbitMQ refuses during an election; or whoever waits for an answer may wait for ever."""
    found = broker_check.judge_confirms(["shop.0", "mails"], QUEUES, given)
    if missing is None:
        assert found.severity == "ok"
        return
    assert found.severity == "degraded"
    assert f"Set {missing} in broker_transport_options" in found.sentence


def test_quorum_queues_of_others_are_told_from_those_of_the_bridge() -> None:
    """Without confirmations partitions may stand by the one, and tasks be lost by the other."""
    of_bridge = broker_check.judge_confirms(["shop.1", "mails"], QUEUES, {}).sentence
    assert "shop.1" in of_bridge
    assert "mails" not in of_bridge
    of_others = broker_check.judge_confirms(["mails"], QUEUES, {}).sentence
    assert "mails" in of_others
