"""What a decorator takes, what it refuses with which sentence, and what the task can do without a listener."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest
from celery import Celery
from pymongo import MongoClient

from mongo_celery import Bridge, Change, Changes, Fence
from mongo_celery.bridge.listener.in_worker import LISTENER_OPTION, ListenerStep
from mongo_celery.bridge.wiring import BRIDGES
from mongo_celery.bridge.worker.tasks import COMMIT_TASK
from mongo_celery.errors import ConfigurationError, HandlerUsageError

URL = "mongodb://127.0.0.1:1/shop?replicaSet=rs0"
CHANGE = Change.build("insert", ns="shop.orders", full_document={"_id": 7})


def make_app(**settings: Any) -> Celery:
    return Celery("shop", broker="memory://", set_as_current=False, **settings)


@pytest.fixture
def app() -> Iterator[Celery]:
    with make_app() as made:
        yield made


@pytest.fixture
def bridge(app: Celery) -> Bridge:
    return Bridge(app, URL, name="shop")


def handle(change: Change) -> Any:
    return change.document_key


def handle_bound(self: Any, change: Change) -> Any:
    return self.name, change.document_key


async def handle_later(change: Change) -> None:
    """A coroutine function."""


def handle_yielding(change: Change) -> Iterator[str]:
    yield change.namespace


def handle_without(*, change: Change) -> None:
    """Takes the change by name only."""


def register(bridge: Bridge, **arguments: Any) -> Any:
    return bridge.on_change("shop.orders", **arguments)(handle)


class Shop:
    def handle(self, change: Change) -> None:
        """A method."""

    def __call__(self, change: Change) -> None:
        """An instance that can be called."""


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"partition_by": "customer"}, "partition_by"),
    ({"partition_by": "fullDocumentBeforeChange.customer"}, "full_document_before_change"),
    ({"operations": {"upsert"}}, "upsert"),
    ({"operations": {"create", "insert"}}, "show_expanded_events=True"),
    ({"operations": {"vacuum"}}, "vacuum"),
    ({"fields": {"a"}, "operations": {"insert", "delete"}}, "update"),
    ({"match": {"$eq": ["$ns.db", "a"], "$ne": ["$ns.coll", "b"]}}, "match"),
    ({"match": {"$eq": ["$fullDocument.user", UUID(int=1)]}}, "match"),
    ({"match": {"$in": ["$fullDocument.kind", {"a", "b"}]}}, "match"),
    ({"match": {"$and": [{"status": "paid"}, {"$eq": ["$ns.coll", "b"]}]}}, "match"),
    ({"match": {"$or": [{"$not": {"status": "paid"}}]}}, "match"),
    ({"match": {"$eq": ["$status", "paid"]}}, r"'\$fullDocument.status'"),
    ({"match": {"$not": [{"$eq": ["$fullDocument.a", 1]}]}, "operations": {"delete"}}, "fullDocument"),
    ({"group": "3"}, "group"),
    ({"queue": "slow"}, "group="),
]
_PROTOCOL = (
    "queue exchange routing_key priority eta countdown expires acks_late acks_on_failure acks_on_timeout "
    "acks_on_failure_or_timeout reject_on_worker_lost ignore_result serializer compression"
)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        *((name, name) for name in _PROTOCOL.split()),
        *((name, rf"Bridge\(..., {name}=") for name in ("run_size", "partitions", "lease_ttl")),
        *((name, name) for name in ("typing", "shared", "abstract", "handler", "request_stack")),
        ("max_retry", "'max_retries'"),
        ("operation", "'operations'"),
    ],
)
def test_an_option_that_is_none_of_a_handler_is_refused(bridge: Bridge, option: str, said: str) -> None:
    """P2, P8, P9: the protocol's own, the bridge's own, and what Celery would take as an attribute, silently."""
    with pytest.raises(ConfigurationError, match=said):
        register(bridge, **{option: True})
    assert bridge.handlers == []


@pytest.mark.parametrize(
    ("decorator", "sources", "options", "word"),
    [
        ("on_change", (), {}, "source"),
        ("on_change", ("shop.orders", "admin.x"), {}, "source"),
        ("on_change", ("shop.orders",), {"batch_size": 5}, "on_changes"),
        ("on_changes", ("shop.orders",), {"run_size": 5}, "run_size"),
        ("on_changes", ("shop.orders",), {"coalesc": True}, "'coalesce'"),
        ("on_change", ("shop.orders",), {"coalesce": True, "transactional": True}, "on_changes"),
        ("on_change", ("shop.orders",), {"coalesce": True, "rate": "5/s"}, "on_changes"),
        ("on_changes", ("shop.orders",), {"rate": "5/s", "rate_limit": "5/s"}, "Remove one"),
        ("on_change", ("shop.orders",), {"coalesce": True}, "run_size"),
        ("on_changes", ("shop.orders",), {"coalesce": True, "batch_size": 1}, "batch_size"),
        *(("on_change", ("shop.orders",), options, word) for options, word in WRONG),
    ],
)
def test_what_a_decorator_cannot_mean_is_refused(
    bridge: Bridge, decorator: str, sources: tuple[Any, ...], options: dict[str, Any], word: str
) -> None:
    """P1, P9: in the traceback of the decorator, with where it belongs."""
    with pytest.raises(ConfigurationError, match=word):
        getattr(bridge, decorator)(*sources, **options)(handle)
    assert bridge.handlers == []


@pytest.mark.parametrize(
    ("function", "options"),
    [
        *((function, {}) for function in (handle_yielding, Shop.handle, Shop().handle, Shop(), Shop)),
        *((function, {}) for function in (functools.partial(handle), len, "handle", handle_without)),
        *((function, {}) for function in (lambda: None, lambda change, more: (change, more), lambda change: change)),
        (handle, {"bind": True}),
    ],
)
def test_what_cannot_be_a_handler_is_refused(bridge: Bridge, function: Any, options: dict[str, Any]) -> None:
    """P9: when the decorator runs, not when the first change comes."""
    with pytest.raises(ConfigurationError):
        bridge.on_change("shop.orders", name="handler", **options)(function)
    assert bridge.handlers == []


def test_two_handlers_or_bridges_of_one_name_are_refused(app: Celery, bridge: Bridge) -> None:
    """P1, P3: they would share a position, or a lease. A function has one decorator with all its sources."""
    once = bridge.on_change("shop.orders")(handle)
    with pytest.raises(ConfigurationError, match="name="):
        bridge.on_change("shop.invoices", name="handle")(another)
    with pytest.raises(ConfigurationError):
        bridge.on_change("shop.invoices")(once)
    with pytest.raises(ConfigurationError):
        Bridge(app, URL, name="shop")
    assert BRIDGES.find(app, "shop") is bridge.wiring
    with MongoClient[dict[str, Any]](URL, connect=False) as client, pytest.raises(ConfigurationError):
        Bridge(app, client)  # type: ignore[arg-type] # one that was opened before a fork cannot be used after it


def another(change: Change) -> None:
    """Another handler."""


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize(
    ("sources", "options"),
    [(("shop.b",), {}), (("shop.a", "shop.b"), {}), (("shop.a",), {"operations": {"insert"}})],
    ids=["source", "more sources", "operations"],
)
def test_a_second_decorator_does_not_replace_the_first(
    app: Celery, lazy: bool, sources: tuple[Any, ...], options: dict[str, Any]
) -> None:
    """P1: changes of the first source would never come. A reloaded module runs the same decorator twice."""
    bridge = Bridge(None if lazy else app, URL, name="shop")
    for _ in range(2):
        bridge.on_change("shop.a")(handle)
    make_and_register(bridge, "shop.a")
    with pytest.raises(ConfigurationError):
        bridge.on_change(*sources, **options)(handle)
    with pytest.raises(ConfigurationError):
        make_and_register(bridge, *sources, **options)
    assert [handler.targets for handler in bridge.wiring.handlers] == [("shop.a",), ("shop.a",)]


def make_and_register(bridge: Bridge, *sources: Any, **options: Any) -> None:
    def made(change: Change) -> None:
        """Do nothing."""

    bridge.on_change(*sources, **options)(made)


def test_no_two_handlers_and_tasks_share_a_name_of_a_task(app: Celery, bridge: Bridge) -> None:
    """P1: Celery would keep the first task of that name, and the second subscription would wait for ever."""
    bridge.on_change("shop.orders")(handle)
    with pytest.raises(ConfigurationError, match=r"test_registration\.handle"):
        bridge.on_change("shop.invoices", name="other")(handle)
    with pytest.raises(ConfigurationError, match=r"test_registration\.handle"):
        Bridge(app, URL, name="second").on_change("shop.orders")(handle)
    late = Bridge(None, URL, name="late")
    late.on_change("shop.orders")(handle)
    with pytest.raises(ConfigurationError, match=r"test_registration\.handle"):
        late.init_app(app)
    app.task(shared=False)(another)
    bridge.on_change("shop.orders")(another)
    with pytest.raises(ConfigurationError, match=r"test_registration\.another"):
        bridge.wiring.stream()


def test_a_decorator_without_parentheses_is_refused_at_once(app: Celery, bridge: Bridge) -> None:
    """P9: the function would be taken for a source, and nothing would be registered."""
    late = Bridge(None, URL, name="late").on_change("shop.orders")(handle)
    for function in (
        handle,
        handle_later,
        Shop().handle,
        functools.partial(handle),
        app.task(shared=False)(handle),
        late,
    ):
        with pytest.raises(ConfigurationError, match="@bridge"):
            bridge.on_change(function)
    with pytest.raises(ConfigurationError, match="@bridge"):
        bridge.on_change("shop.orders", handle)
    assert bridge.handlers == []


def test_annotations_leave_the_protocol_alone(caplog: pytest.LogCaptureFixture) -> None:
    """P1, P2: `{"*": {"acks_late": False}}` is common, and methods would run outside the claim. It is logged."""
    of_all = {"acks_late": False, "rate_limit": "1/s", "__call__": lambda *_: None, "@retry": lambda retry: retry}
    with make_app(task_annotations={"tests.*": {}, "*": of_all}) as app:
        bridge = Bridge(app, URL)
        task = app.tasks[bridge.on_change("shop.orders")(handle).name]
        assert (task.acks_late, task.rate_limit, app.tasks[COMMIT_TASK].acks_late) == (True, "1/s", True)
        assert task(CHANGE) == {"_id": 7}
    assert [vars(each).get("event") for each in caplog.records].count("annotations_ignored") == 2


def test_a_bridge_has_the_queues_of_the_groups_that_its_handlers_are_in(app: Celery) -> None:
    """P9: no two of them share one, and none is consumed for nobody. The worker's option is there once."""
    bridge = Bridge(app, URL, name="shop", queues=2)
    assert bridge.wiring.queue_names == ["shop.0", "shop.1"], "before any handler"
    register(bridge, name="billing", group="slow")
    assert bridge.wiring.queue_names == ["shop.slow.0", "shop.slow.1"]
    bridge.on_change("shop.orders")(another)
    assert bridge.wiring.queue_names == ["shop.0", "shop.1", "shop.slow.0", "shop.slow.1"]
    second = Bridge(app, URL, name="second")
    assert not set(bridge.wiring.queue_names) & set(second.wiring.queue_names)
    assert BRIDGES.of(app) == [bridge.wiring, second.wiring]
    assert list(app.user_options["worker"]).count(LISTENER_OPTION) == 1
    assert ListenerStep in app.steps["worker"]


@pytest.mark.parametrize(
    ("function", "options", "result"),
    [
        (handle, {"transactional": True}, {"_id": 7}),
        (handle, {"autoretry_for": (LookupError,)}, {"_id": 7}),
        (handle_bound, {"bind": True}, ("tests.unit.test_registration.handle_bound", {"_id": 7})),
    ],
)
def test_calling_a_handler_with_a_change_just_runs_it(
    bridge: Bridge, function: Any, options: dict[str, Any], result: object
) -> None:
    """A unit test of a handler needs no server, and sees its own error. P9: anything else is refused."""
    task: Any = bridge.on_change("shop.orders", **options)(function)
    assert task(CHANGE) == result

    def fail(change: Change) -> None:
        raise LookupError(change.namespace)

    with pytest.raises(LookupError):
        bridge.on_change("shop.orders", **{**options, "bind": False})(fail)(CHANGE)
    for arguments in ((), (7,), ({"_id": 7},), (None,)):
        with pytest.raises(HandlerUsageError, match=r"Change\.build"):
            task(*arguments)


def test_a_bulk_handler_says_which_change_has_failed() -> None:
    """P9: of its list alone; in a unit test it is what leaves the handler. P3: a list has one fence."""
    changes = Changes([replace(CHANGE, seq=1), replace(CHANGE, seq=2)])
    for failed in (1, changes[1]):
        said = pickle.loads(pickle.dumps(changes.failed_at(failed)))
        assert (said.place, said.changes) == (1, ()), "no documents travel with it"
    for wrong in (2, -1, True, "1", CHANGE):
        with pytest.raises(HandlerUsageError):
            changes.failed_at(wrong)  # type: ignore[arg-type]
    fences = [Fence("shop/copy", 0, 0, token) for token in (2, 3)]
    built = [Change.build("insert", ns="shop.orders", full_document={"_id": 1}, fence=fence) for fence in fences]
    for several in (built, built[:1]):
        with pytest.raises(HandlerUsageError):
            Changes(several).fenced("shop.copies")


@pytest.mark.parametrize(
    "publish",
    [
        lambda task: task.delay(CHANGE),
        lambda task: task.s(CHANGE).apply_async(countdown=5),
        lambda task: (task.s(CHANGE) | task.s(CHANGE)).apply_async(),
        lambda task: task.replace(task.s(CHANGE)),
        lambda task: task.add_to_chord(task.s(CHANGE)),
    ],
)
def test_only_the_listener_sends_a_handler(bridge: Bridge, publish: Callable[[Any], Any]) -> None:
    """P2: a message of one's own would come beside the order, and a replacement would be committed before it runs."""
    task = bridge.on_change("shop.orders")(handle)
    with pytest.raises(HandlerUsageError):
        publish(task)
