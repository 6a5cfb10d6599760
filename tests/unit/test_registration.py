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
from celery.app.task import Task
from pymongo import MongoClient

from mongo_celery import Bridge, Change, Changes, Fence
from mongo_celery.bridge.handlers import TASK_OPTIONS
from mongo_celery.bridge.listener.in_worker import LISTENER_OPTION, ListenerStep
from mongo_celery.bridge.wiring import BRIDGES
from mongo_celery.bridge.worker.tasks import COMMIT_TASK, PROTOCOL_ATTRIBUTES, PROTOCOL_METHODS
from mongo_celery.errors import ConfigurationError, HandlerUsageError

URL = "mongodb://127.0.0.1:1/shop?replicaSet=rs0"
CHANGE = Change.build("insert", ns="shop.orders", full_document={"_id": 7})


def make_app(**settings: Any) -> Celery:
    return Celery("shop", broker="memory://", set_as_current=False, **settings)


@pytest.fixture
def app() -> Iterator[Celery]:
    """Give an app of this test's own."""
    with make_app() as made:
        yield made


@pytest.fixture
def bridge(app: Celery) -> Bridge:
    """Give a bridge of this test's own; nothing connects."""
    return Bridge(app, URL, name="shop")


def handle(change: Change) -> Any:
    """A handler at module level."""
    return change.document_key


def handle_bound(self: Any, change: Change) -> Any:
    """A handler that gets its task."""
    return self.name, change.document_key


async def handle_later(change: Change) -> None:
    """A coroutine function."""


async def handle_stream(change: Change) -> Any:
    """An asynchronous generator."""
    yield change


def handle_yielding(change: Change) -> Iterator[str]:
    """A generator, which would do nothing when it is called."""
    yield change.namespace


def handle_without(*, change: Change) -> None:
    """Takes the change by name only."""


def register(bridge: Bridge, **arguments: Any) -> Any:
    """Register the handler with arguments that no type checker would let pass."""
    return bridge.on_change("shop.orders", **arguments)(handle)


class Shop:
    """A class with handlers, which cannot be."""

    def handle(self, change: Change) -> None:
        """A method."""

    def __call__(self, change: Change) -> None:
        """An instance that can be called."""


def key_of(change: Any) -> Any:
    """A partition rule."""
    return change["documentKey"]["_id"]


# What is refused


_PROTOCOL = (
    "queue exchange routing_key priority eta countdown expires acks_late acks_on_failure acks_on_timeout "
    "acks_on_failure_or_timeout reject_on_worker_lost ignore_result serializer compression"
)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        *((name, "cannot be set on a change handler") for name in _PROTOCOL.split()),
        *((name, rf"Bridge\(..., {name}=...\)") for name in ("run_size", "partitions", "lease_ttl")),
        *((name, "unknown") for name in ("typing", "shared", "abstract", "handler", "request_stack")),
        ("max_retry", "'max_retries'"),
        ("retry_backof", "'retry_backoff'"),
        ("operation", "'operations'"),
        ("ratelimit", "'rate_limit'"),
    ],
)
def test_an_option_that_is_none_of_a_handler_is_refused(bridge: Bridge, option: str, said: str) -> None:
    """P2, P8, P9: the protocol's own, the bridge's own, and what Celery would take as an attribute, silently."""
    with pytest.raises(ConfigurationError, match=f"{option}.*{said}"):
        register(bridge, **{option: True})
    assert bridge.handlers == []


@pytest.mark.parametrize(
    ("decorator", "sources", "options", "said"),
    [
        ("on_change", (), {}, "source"),
        ("on_change", ("shop.orders",), {"batch_size": 5}, "on_changes"),
        ("on_changes", ("shop.orders",), {"run_size": 5}, "run_size"),
        ("on_changes", ("shop.orders",), {"coalesc": True}, "'coalesce'"),
        ("on_change", ("shop.orders",), {"coalesce": True, "transactional": True}, "on_changes"),
        ("on_change", ("shop.orders",), {"coalesce": True}, "run_size=1"),
    ],
)
def test_what_a_decorator_cannot_mean_is_refused(
    bridge: Bridge, decorator: str, sources: tuple[str, ...], options: dict[str, Any], said: str
) -> None:
    """P9: with where it belongs."""
    with pytest.raises(ConfigurationError, match=said):
        getattr(bridge, decorator)(*sources, **options)(handle)


@pytest.mark.parametrize(
    ("function", "options", "sentence"),
    [
        (handle_later, {}, "must be a plain function"),
        (handle_stream, {}, "must be a plain function"),
        (handle_yielding, {}, "must be a plain function"),
        (Shop.handle, {}, "cannot be a method. Use a function"),
        (Shop().handle, {}, "needs a function, not method"),
        (Shop(), {}, "needs a function, not Shop"),
        (Shop, {}, "needs a function, not type"),
        (functools.partial(handle), {}, "needs a function, not partial"),
        (len, {}, "needs a function, not builtin_function_or_method"),
        ("handle", {}, "needs a function, not str"),
        (lambda: None, {}, "must take 1 argument: the change"),
        (lambda change, more: (change, more), {}, "must take 1 argument: the change"),
        (lambda change: change, {}, "cannot be a lambda"),
        (handle_without, {}, "must take 1 argument: the change"),
        (handle, {"bind": True}, "must take 2 arguments: the task and the change"),
    ],
)
def test_what_cannot_be_a_handler_is_refused(
    bridge: Bridge, function: Any, options: dict[str, Any], sentence: str
) -> None:
    """P9: when the decorator runs, not when the first change comes."""
    with pytest.raises(ConfigurationError, match=sentence):
        bridge.on_change("shop.orders", name="handler", **options)(function)
    assert bridge.handlers == []


@pytest.mark.parametrize("lazy", [False, True])
def test_stacked_decorators_are_refused(app: Celery, lazy: bool) -> None:
    """P9: one function, several sources: they are arguments of one decorator. Also on a bridge without an app."""
    bridge = Bridge(None if lazy else app, URL, name="shop")
    once = bridge.on_change("shop.orders")(handle)
    with pytest.raises(ConfigurationError, match="plain function"):
        bridge.on_change("shop.invoices")(once)


def test_two_handlers_of_one_name_are_refused(bridge: Bridge) -> None:
    """P1: they would share one position."""
    bridge.on_change("shop.orders")(handle)
    with pytest.raises(ConfigurationError, match=r"'handle' .*name='\.\.\.'"):
        bridge.on_change("shop.invoices", name="handle")(handle_bound_to_none)


def handle_bound_to_none(change: Change) -> None:
    """Another handler."""


def test_the_same_handler_again_is_a_reloaded_module(bridge: Bridge) -> None:
    """Autoreloaders and double imports run the decorator twice on the same code."""
    for _ in range(2):
        bridge.on_change("shop.orders")(handle)
    assert [handler.name for handler in bridge.handlers] == ["handle"]


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize(
    ("sources", "options"),
    [(("shop.b",), {}), (("shop.a", "shop.b"), {}), (("shop.a",), {"operations": {"insert"}})],
    ids=["source", "more sources", "operations"],
)
def test_a_second_decorator_does_not_replace_the_first(
    app: Celery, lazy: bool, sources: tuple[Any, ...], options: dict[str, Any]
) -> None:
    """P1: changes of the first source would never come. Also of a function that a factory makes twice."""
    bridge = Bridge(None if lazy else app, URL, name="shop")
    bridge.on_change("shop.a")(handle)
    with pytest.raises(ConfigurationError, match="one decorator"):
        bridge.on_change(*sources, **options)(handle)
    make_and_register(bridge, "shop.a")
    with pytest.raises(ConfigurationError, match="one decorator"):
        make_and_register(bridge, *sources, **options)
    assert [handler.targets for handler in bridge.wiring.handlers] == [("shop.a",), ("shop.a",)]


def make_and_register(bridge: Bridge, *sources: Any, **options: Any) -> None:
    """Define a handler in a function that is called several times."""

    def made(change: Change) -> None:
        """Do nothing."""

    bridge.on_change(*sources, **options)(made)


def test_two_subscriptions_never_share_a_task(app: Celery, bridge: Bridge) -> None:
    """P1: Celery would keep the first task of that name, and the second subscription would wait for ever."""
    bridge.on_change("shop.orders")(handle)
    sentence = (
        "would share the Celery task tests.unit.test_registration.handle. Give each a function with a different name"
    )
    with pytest.raises(ConfigurationError, match=sentence):
        bridge.on_change("shop.invoices", name="other")(handle)
    with pytest.raises(ConfigurationError, match=sentence):
        Bridge(app, URL, name="second").on_change("shop.orders")(handle)
    late = Bridge(None, URL, name="late")
    late.on_change("shop.orders")(handle)
    with pytest.raises(ConfigurationError, match=sentence):
        late.init_app(app)


def test_a_decorator_without_parentheses_is_refused_at_once(app: Celery, bridge: Bridge) -> None:
    """P9: the function would be taken for a source, and nothing would be registered."""
    late = Bridge(None, URL, name="late")
    tasks = [app.task(handle), app.task(name="bound", bind=True)(handle_bound), late.on_change("shop.orders")(handle)]
    plain = (handle, handle_later, lambda change: change, Shop().handle, functools.partial(handle))
    for function in (*plain, *tasks):
        with pytest.raises(ConfigurationError, match=r'Write @bridge\.on_change\("db\.collection"\)'):
            bridge.on_change(function)
    with pytest.raises(ConfigurationError, match="Write @bridge"):
        bridge.on_change("shop.orders", handle)
    assert bridge.handlers == []


@pytest.mark.parametrize("source", ["shop.", "admin.x", "*.orders", 42, None, ["shop.orders"]])
def test_a_bad_source_is_refused_at_once(bridge: Bridge, source: object) -> None:
    """P9: in the traceback of the decorator, not of the listener."""
    with pytest.raises(ConfigurationError, match="source"):
        bridge.on_change("shop.orders", source)(handle)


def test_a_source_that_depends_on_the_url_or_on_a_framework_waits(bridge: Bridge) -> None:
    """The URL may come from settings, and models are set up after imports."""
    bridge.on_change("orders")(handle)
    (handler,) = bridge.handlers
    assert str(handler.selector(bridge.wiring.default_database).sources[0]) == "shop.orders"
    with pytest.raises(ConfigurationError, match="has no database"):
        handler.selector(None)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"partition_by": "customer"}, "may differ when the change is read again"),
        ({"partition_by": "fullDocumentBeforeChange.customer"}, "full_document_before_change='required'"),
        ({"partition_by": lambda change: change}, "must be a function at module level"),
        ({"operations": {"upsert"}}, "operation 'upsert' is unknown"),
        ({"operations": {"create", "insert"}}, "'create' would never come. .* show_expanded_events=True"),
        ({"operations": {"vacuum"}}, "'vacuum' would never come. .* or correct the name"),
        ({"fields": {"a"}, "operations": {"insert", "delete"}}, "does not include 'update'"),
        ({"match": {"$eq": ["$ns.db", "a"], "$ne": ["$ns.coll", "b"]}}, "is not a condition"),
        ({"match": {"$eq": ["$fullDocument.user", UUID(int=1)]}}, "cannot be sent to MongoDB"),
        ({"match": {"$in": ["$fullDocument.kind", {"a", "b"}]}}, "cannot be sent to MongoDB"),
        ({"match": {"$and": [{"status": "paid"}, {"$eq": ["$ns.coll", "b"]}]}}, "is true for every change"),
        ({"match": {"$or": [{"$not": {"status": "paid"}}]}}, "is true for every change"),
        ({"match": {"$eq": ["$status", "paid"]}}, r"use '\$fullDocument.status'"),
        ({"match": {"$not": [{"$eq": ["$fullDocument.a", 1]}]}, "operations": {"delete"}}, "reads .fullDocument, but"),
        ({"group": "3"}, "group='3' must not be a number"),
        ({"queue": "slow"}, "separate queues, use group='...'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_an_argument_that_cannot_work_is_refused(bridge: Bridge, arguments: dict[str, Any], sentence: str) -> None:
    """P1, P9: when the decorator runs."""
    with pytest.raises(ConfigurationError, match=sentence):
        register(bridge, **arguments)
    assert bridge.handlers == []


def test_a_client_in_place_of_the_url_is_refused(app: Celery) -> None:
    """A MongoClient that was opened before a fork cannot be used after it."""
    with (
        MongoClient[dict[str, Any]](URL, connect=False) as client,
        pytest.raises(ConfigurationError, match="not a client"),
    ):
        Bridge(app, client)  # type: ignore[arg-type]


# What is registered


def test_a_handler_becomes_a_task_with_the_attributes_of_the_protocol(app: Celery, bridge: Bridge) -> None:
    """P2: a worker with this task acknowledges late and stores nothing."""
    task: Any = bridge.on_change("shop.orders", max_retries=8, rate_limit="5/s")(handle)
    assert task.name == "tests.unit.test_registration.handle"
    assert app.tasks[task.name] is task._get_current_object()
    assert {name: getattr(task, name) for name in PROTOCOL_ATTRIBUTES} == PROTOCOL_ATTRIBUTES
    assert (task.max_retries, task.rate_limit) == (8, "5/s")
    assert {name: getattr(app.tasks[COMMIT_TASK], name) for name in PROTOCOL_ATTRIBUTES} == PROTOCOL_ATTRIBUTES


def test_annotations_leave_the_protocol_alone(caplog: pytest.LogCaptureFixture) -> None:
    """P1, P2: `{"*": {"acks_late": False}}` is common, and methods would run outside the claim. It is logged."""
    of_methods = {"__call__": lambda *_: None, "@retry": lambda retry: retry, "before_start": lambda *_: None}
    of_all = {"acks_late": False, "rate_limit": "1/s", **of_methods}
    with make_app(task_annotations={"tests.*": {}, "*": of_all}) as app:
        bridge = Bridge(app, URL)
        name = bridge.on_change("shop.orders")(handle).name
        assert (app.tasks[name].acks_late, app.tasks[name].rate_limit) == (True, "1/s")
        assert app.tasks[COMMIT_TASK].acks_late is True
        kind = vars(type(app.tasks[name]))
        assert not PROTOCOL_METHODS & kind.keys()
        assert kind["_begin"] is of_methods["before_start"], "it is called under the claim"
    events = [vars(each).get("event") for each in caplog.records]
    assert events.count("annotations_ignored") == 2, "of the handler's task and of the commit task"


@pytest.mark.parametrize("option", sorted(TASK_OPTIONS - {"base", "bind", "autoretry_for", "dont_autoretry_for"}))
def test_celerys_own_options_reach_the_task(bridge: Bridge, option: str) -> None:
    """What is taken has an effect."""
    flags = dict.fromkeys(("retry_jitter", "send_events", "track_started"), True)
    value = {**flags, "retry_kwargs": {"max_retries": 77}, "throws": (KeyError,)}.get(option, 77)
    task = register(bridge, **{option: value})
    assert getattr(task, option) == value


def test_expanded_operations_need_the_bridges_option(app: Celery) -> None:
    """Given to it, or by a setting."""
    bridge = Bridge(app, URL, show_expanded_events=True)
    register(bridge, operations={"create", "vacuum"})
    assert [handler.filter.operations for handler in bridge.handlers] == [{"create", "vacuum"}]
    assert bridge.wiring.stream()[1].options["showExpandedEvents"] is True
    with make_app(mongo_celery_show_expanded_events=True) as other:
        register(Bridge(other, URL), operations={"create"})


def test_a_handler_may_have_its_own_rules(bridge: Bridge) -> None:
    """Its own where it has some, the bridge's where it has none."""
    register(bridge, name="mine", partition_by=key_of, failure_policy="skip", operations=["delete"], commit="inline")
    bridge.on_change("shop.orders")(handle_bound_to_none)
    plain, mine = bridge.handlers
    assert (mine.name, mine.policy(bridge.options), set(mine.filter.operations)) == ("mine", "skip", {"delete"})
    assert mine.partitioner(bridge.options).name == "tests.unit.test_registration:key_of"
    assert (plain.name, plain.policy(bridge.options)) == ("handle_bound_to_none", "halt")
    assert plain.partitioner(bridge.options).name == "_id"
    assert (plain.commits_inline(bridge.options), mine.commits_inline(bridge.options)) == (False, True)
    assert plain.commits_inline(replace(bridge.options, commit="inline"))


def test_a_bridge_has_the_queues_of_the_groups_that_its_handlers_are_in(app: Celery) -> None:
    """P9: no two of them share one, and none is consumed for nobody."""
    bridge = Bridge(app, URL, name="shop", queues=2)
    assert (bridge.wiring.groups, bridge.wiring.queue_names) == ([None], ["shop.0", "shop.1"]), "before any handler"
    register(bridge, name="billing", group="slow")
    assert bridge.wiring.queue_names == ["shop.slow.0", "shop.slow.1"]
    bridge.on_change("shop.orders")(handle_bound_to_none)
    assert bridge.wiring.groups == [None, "slow"]
    assert bridge.wiring.queue_names == ["shop.0", "shop.1", "shop.slow.0", "shop.slow.1"]


# What the task can do without a listener


@pytest.mark.parametrize(
    ("function", "options", "result"),
    [
        (handle, {}, {"_id": 7}),
        (handle, {"transactional": True}, {"_id": 7}),
        (handle_bound, {"bind": True}, ("tests.unit.test_registration.handle_bound", {"_id": 7})),
    ],
)
def test_calling_a_handler_with_a_change_just_runs_it(
    bridge: Bridge, function: Any, options: dict[str, Any], result: object
) -> None:
    """A unit test of a handler needs no server, and there is no execution whose success a transaction could record."""
    task: Any = bridge.on_change("shop.orders", **options)(function)
    assert task(CHANGE) == result


def test_calling_a_bulk_handler_with_a_list_just_runs_it(bridge: Bridge) -> None:
    """P9: what it gets is what a worker gives it."""

    @bridge.on_changes("shop.orders", batch_size=7)
    def handle_all(changes: Changes) -> Any:
        return changes, changes.session

    changes, session = handle_all([CHANGE, CHANGE])
    assert (type(changes), list(changes), session) == (Changes, [CHANGE, CHANGE], None)
    assert bridge.handlers[0].batch_size == 7
    with pytest.raises(HandlerUsageError, match="takes a list of Change"):
        handle_all(CHANGE)  # type: ignore[arg-type]
    with pytest.raises(HandlerUsageError, match="at least one change"):
        handle_all([])


def test_a_bulk_handler_says_which_change_has_failed() -> None:
    """P9: of its list alone; in a unit test it is what leaves the handler."""
    changes = Changes([replace(CHANGE, seq=1), replace(CHANGE, seq=2)])
    for failed in (1, changes[1]):
        said = pickle.loads(pickle.dumps(changes.failed_at(failed)))
        assert (said.place, str(said)) == (1, "the handler reported that shop.orders insert 7 has failed")
        assert said.changes == (), "no documents travel with it"
    for wrong in (2, -1, True, "1", CHANGE):
        with pytest.raises(HandlerUsageError, match="from 0 to 1"):
            changes.failed_at(wrong)  # type: ignore[arg-type]


def test_the_fence_of_a_list_is_one() -> None:
    """P3: changes that were built by hand with several are no list of one execution."""
    fences = [Fence("shop/copy", 0, 0, token) for token in (2, 3)]
    built = [Change.build("insert", ns="shop.orders", full_document={"_id": 1}, fence=fence) for fence in fences]
    with pytest.raises(HandlerUsageError, match="several fences"):
        Changes(built).fenced("shop.copies")
    with pytest.raises(HandlerUsageError, match=r"Change.build\(..., client=...\)"):
        Changes(built[:1]).fenced("shop.copies")


def test_errors_of_a_handler_pass_through_a_direct_call(bridge: Bridge) -> None:
    """A unit test sees the handler's own error, with autoretry too."""

    def fail(change: Change) -> None:
        raise LookupError(change.namespace)

    with pytest.raises(LookupError, match=r"shop\.orders"):
        bridge.on_change("shop.orders", autoretry_for=(LookupError,))(fail)(CHANGE)


@pytest.mark.parametrize("arguments", [(), (7,), ({"_id": 7},), (None,)])
def test_calling_a_handler_with_anything_else_says_what_it_takes(bridge: Bridge, arguments: tuple[Any, ...]) -> None:
    """P9: and how to make one."""
    with pytest.raises(HandlerUsageError, match=r"Change\.build\('insert', ns=\.\.\.\)"):
        bridge.on_change("shop.orders")(handle)(*arguments)


@pytest.mark.parametrize(
    "publish",
    [
        lambda task: task.delay(CHANGE),
        lambda task: task.apply_async((CHANGE,)),
        lambda task: task.s(CHANGE).delay(),
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


class Context:
    """Whether an application context is open."""

    open = False


class ContextTask(Task):  # type: ignore[type-arg]
    """A task class as Flask's documentation shows it."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        Context.open = True
        try:
            return self.run(*args, **kwargs)
        finally:
            Context.open = False


def test_the_apps_own_call_is_kept() -> None:
    """Flask opens its application context there, and Django its own things."""
    with make_app(task_cls=ContextTask) as app:
        task: Any = Bridge(app, URL).on_change("shop.orders")(lambda_that_looks)
        assert isinstance(task._get_current_object(), ContextTask)
        assert task(CHANGE) is True
        assert not Context.open


def lambda_that_looks(_change: Change) -> bool:
    """A handler that needs the context."""
    return Context.open


class Base(Task):  # type: ignore[type-arg]
    """A base class of the user's, for one handler."""

    abstract = True
    colour = "green"


def test_a_handler_may_have_a_base_class(bridge: Bridge) -> None:
    """Our class comes before it, so that it sees changes and not messages."""
    task: Any = bridge.on_change("shop.orders", base=Base)(handle)
    assert task.colour == "green"
    assert task(CHANGE) == {"_id": 7}


# Bridges and apps


def test_a_bridge_may_meet_its_app_later(app: Celery) -> None:
    """Handlers that were registered before become tasks then; until then they are functions."""
    bridge = Bridge(None, URL, name="shop")
    task = bridge.on_change("shop.orders")(handle)
    assert task(CHANGE) == {"_id": 7}
    with pytest.raises(ConfigurationError, match=r"init_app\(app\)"):
        bridge.app  # noqa: B018 - asked for
    bridge.init_app(app)
    assert bridge.app is app
    assert task.name in app.tasks
    assert task(CHANGE) == {"_id": 7}


def test_a_bridge_belongs_to_one_app(app: Celery, bridge: Bridge) -> None:
    """P9: its tasks would be known to the first only."""
    with pytest.raises(ConfigurationError, match="already has an app"):
        bridge.init_app(app)


def test_an_app_may_have_two_bridges(app: Celery, bridge: Bridge) -> None:
    """Each has its own handlers, queues and position; the worker's option is there once."""
    second = Bridge(app, "mongodb://127.0.0.1:2", name="second", partitions=2)
    first_task: Any = bridge.on_change("shop.orders")(handle)
    second_task: Any = second.on_change("shop.orders")(handle_bound_to_none)
    assert (first_task.wiring, second_task.wiring) == (bridge.wiring, second.wiring)
    assert BRIDGES.of(app) == [bridge.wiring, second.wiring]
    assert not set(bridge.wiring.queue_names) & set(second.wiring.queue_names)
    assert list(app.user_options["worker"]).count(LISTENER_OPTION) == 1
    assert ListenerStep in app.steps["worker"]


def test_two_bridges_of_one_name_are_refused(app: Celery, bridge: Bridge) -> None:
    """P3: they would share a lease."""
    with pytest.raises(ConfigurationError, match="bridge named 'shop'"):
        Bridge(app, URL, name="shop")
    assert BRIDGES.find(app, "shop") is bridge.wiring


def test_what_a_bridge_shows_of_itself_hides_the_url(app: Celery) -> None:
    """A URL may carry a password."""
    bridge = Bridge(app, "mongodb://user:secret@127.0.0.1:1", name="shop")
    bridge.on_change("shop.orders")(handle)
    assert repr(bridge) == "<Bridge shop handlers=['handle']>"


def test_a_collection_is_found_by_its_namespace(bridge: Bridge) -> None:
    """With its database, or in that of the URL; nothing connects."""
    assert bridge.collection("shop.orders.old").full_name == "shop.orders.old"
    assert bridge.collection("orders").full_name == "shop.orders"
    bridge.client.close()
