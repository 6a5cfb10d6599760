"""Handlers that know neither app nor bridge, in the manner of `shared_task`."""

from __future__ import annotations

import gc
import weakref
from types import FunctionType
from typing import Any

import pytest

from mongo_celery import Bridge, Change, Changes, shared_change, shared_changes
from mongo_celery.bridge import declarations
from mongo_celery.bridge.operations.preflight import _check_celery
from mongo_celery.errors import ConfigurationError
from tests.unit.binding_rig import URL, made_app, summarise

CHANGE = Change.build("insert", ns="shop.orders", full_document={"_id": 7})


def count(changes: Changes) -> int:
    """A bulk handler."""
    return len(changes)


def bound(self: Any, change: Change) -> tuple[Any, Change]:
    """With its task."""
    return self, change


def names(bridge: Bridge) -> list[str]:
    return [handler.name for handler in bridge.handlers]


@pytest.fixture(autouse=True)
def nothing_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Handlers of other tests stay theirs, as their bridges do, and these handlers are nobody else's."""
    own: weakref.WeakSet[Any] = weakref.WeakSet()
    monkeypatch.setattr(declarations, "_SHARED", {})
    monkeypatch.setattr("mongo_celery.bridge.bridge.BOUND", own)
    monkeypatch.setattr(declarations, "BOUND", own)


def test_the_function_stays_what_it_is() -> None:
    """A unit test calls it without app, bridge or task."""
    assert shared_change("shop.orders")(summarise) is summarise
    assert shared_change("shop.orders", bind=True)(bound)("me", CHANGE) == ("me", CHANGE)


def test_the_bridge_of_each_app_takes_it_up_before_or_after() -> None:
    """With a task of its own in each; a module that is imported late serves apps that are there."""
    bridge, app = Bridge(url=URL, name="shop"), made_app(None, "first")
    bridge.init_app(app)
    shared_change("shop.orders", max_retries=7)(summarise)
    shared_changes("shop.orders", batch_size=9)(count)
    other = Bridge(made_app(None, "second"), URL)
    for one in (bridge, other):
        assert names(one) == ["count", "summarise"]
        assert one.handlers[0].batch_size == 9
        task: Any = one.app.tasks[one.handlers[1].task_name]
        assert (task.app, task.bridge, task.max_retries) == (one.app, one.of(one.app), 7)
        assert task(CHANGE) == {"_id": 7}


def test_it_is_for_the_bridge_that_it_names() -> None:
    """And an app without that bridge does not have it."""
    app = made_app(None, "shop")
    orders, carts = (Bridge(app, URL, name=name, autodiscover=False) for name in ("orders", "carts"))
    shared_change("shop.orders", bridge="orders")(summarise)
    shared_changes("shop.carts", bridge="late")(count)
    late = Bridge(app, URL, name="late", autodiscover=False)
    assert (names(orders), names(carts), names(late)) == (["summarise"], [], ["count"])
    another = Bridge(made_app(None, "another"), URL)
    assert names(another) == []
    told = [finding.sentence for finding in _check_celery(another.wiring) if finding.code == "shared_handlers"]
    assert [message.split(", ")[0] for message in told] == [
        "tests.unit.binding_rig.summarise is shared with bridge 'orders'",
        "tests.unit.test_shared_changes.count is shared with bridge 'late'",
    ]
    assert [finding for finding in _check_celery(late.wiring) if finding.code == "shared_handlers"] == []


def test_with_several_bridges_it_has_to_name_one() -> None:
    """Whichever comes later is refused: the handler, or the second bridge."""
    app = made_app(None, "shop")
    orders = Bridge(app, URL, name="orders", autodiscover=False)
    shared_change("shop.orders")(summarise)
    with pytest.raises(ConfigurationError, match=r"summarise names no bridge, and an app has 2 \(carts, orders\)"):
        Bridge(app, URL, name="carts", autodiscover=False)
    assert names(orders) == ["summarise"]

    two = made_app(None, "two")
    declarations._SHARED.clear()
    kept = [Bridge(two, URL, name=name, autodiscover=False) for name in ("orders", "carts")]
    with pytest.raises(ConfigurationError, match=r"count names no bridge.*write shared_change\(\.\.\., bridge='"):
        shared_changes("shop.orders")(count)
    assert [names(bridge) for bridge in kept] == [[], []]
    del two, kept
    shared_changes("shop.orders")(count)
    assert names(orders) == ["count", "summarise"], "an app that is gone has no say"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"queue": "fast"}, "option 'queue' cannot be set"),
        ({"operations": ["insrt"]}, "insrt"),
        ({"max_retires": 1}, "max_retries"),
        ({"start_from": "yesterday"}, "start_from='yesterday'"),
        ({"bridge": "the shop"}, "the name of a bridge 'the shop' must be"),
        ({"bridge": Bridge(name="shop")}, "the name of a bridge <Bridge shop .*> must be"),
    ],
)
def test_what_can_be_known_to_fail_is_refused_without_an_app(options: dict[str, Any], sentence: str) -> None:
    """When the decorator runs."""
    with pytest.raises(ConfigurationError, match=sentence):
        shared_change("shop.orders", **options)(summarise)
    assert declarations._SHARED == {}


def test_what_depends_on_the_bridge_is_refused_when_it_is_bound() -> None:
    """Its options decide, which nobody knows before; an app that has refused it knows nothing of the bridge."""
    shared_change("shop.orders", coalesce=True)(summarise)
    assert names(Bridge(made_app(None, "shop"), URL, run_size=10)) == ["summarise"]
    app = made_app(None, "store")
    with pytest.raises(ConfigurationError, match="coalesce=True does nothing in runs of one change"):
        Bridge(app, URL)
    declarations._SHARED.clear()
    assert names(Bridge(app, URL)) == []


def test_a_handler_that_one_app_refuses_is_shared_with_none() -> None:
    """So the decorator can run again when the fault is mended."""
    fine, odd = made_app(None, "shop"), made_app(None, "store")
    bridges = [Bridge(fine, URL), Bridge(odd, URL, run_size=1), Bridge(made_app(None, "late"), URL)]
    with pytest.raises(ConfigurationError, match="coalesce=True does nothing in runs of one change"):
        shared_change("shop.orders", coalesce=True)(summarise)
    assert ([names(bridge) for bridge in bridges], declarations._SHARED) == ([[], [], []], {})
    shared_change("shop.orders")(summarise)
    tasks: list[Any] = [bridge.app.tasks[bridge.handlers[0].task_name] for bridge in bridges]
    assert [(task.app, task.handler.coalesce) for task in tasks] == [(bridge.app, False) for bridge in bridges]


def test_what_is_written_wrong_says_how() -> None:
    """A decorator without parentheses would register nothing."""
    with pytest.raises(ConfigurationError, match=r'write @shared_change\("db.collection"\) above'):
        shared_change(summarise)
    with pytest.raises(ConfigurationError, match=r'write @shared_changes\("db.collection"\) above'):
        shared_changes(count)
    with pytest.raises(ConfigurationError, match="needs a function, not method"):
        shared_change("shop.orders")(Change.build)  # type: ignore[type-var]


def test_a_name_is_taken_once() -> None:
    """By another function; a module that is imported twice is no other, and by another name it is told so."""
    shared_change("shop.orders")(summarise)
    shared_change("shop.orders")(summarise)
    again = FunctionType(summarise.__code__, {"__name__": "binding_rig"}, "summarise")
    with pytest.raises(ConfigurationError, match=r"now tests\.unit\.binding_rig and binding_rig"):
        shared_change("shop.orders")(again)
    with pytest.raises(ConfigurationError, match=r"a shared handler 'summarise' already.*another name with"):
        shared_change("shop.orders", name="summarise", bind=True)(bound)
    bridge = Bridge(made_app(None, "shop"), URL)
    with pytest.raises(ConfigurationError, match="already has a handler named 'summarise'"):
        bridge.on_change("shop.orders", name="summarise", bind=True)(bound)


def test_shared_handlers_keep_no_app_alive() -> None:
    """They stay for as long as the process, and know no app."""
    shared_change("shop.orders")(summarise)
    bridge = Bridge(made_app(None, "shop"), URL)
    assert bridge.app.tasks[bridge.handlers[0].task_name](CHANGE) == {"_id": 7}
    gone = weakref.ref(bridge.app)
    del bridge
    gc.collect()
    assert gone() is None
