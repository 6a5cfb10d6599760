"""Names of bridges: the app's own, or a given one; never a surprise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from celery import Celery

from mongo_celery import Bridge
from mongo_celery.bridge.definitions import definitions_of
from mongo_celery.bridge.state.candidates import Definitions, is_other_app
from mongo_celery.errors import ConfigurationError

URL = "mongodb://localhost:1"


def celery_app(name: str | None) -> Celery:
    return Celery(name, broker="memory://", set_as_current=False)


def handle(_change: object) -> None:
    """A handler."""


def other(_change: object) -> None:
    """Another one."""


def test_a_bridge_is_called_like_its_app() -> None:
    """So two apps on one cluster do not share a bridge by forgetting a name."""
    assert Bridge(celery_app("shop"), URL).name == "shop"
    assert Bridge(celery_app("shop"), URL).options.queue_of(0) == "shop.0"
    assert Bridge(celery_app("shop"), URL, name="orders").options.name == "orders"


def test_a_bridge_without_app_gets_its_name_when_it_is_bound() -> None:
    """Handlers registered before that get it too."""
    bridge = Bridge(None, URL)
    bridge.on_change("shop.orders")(handle)
    assert bridge.name == "(unnamed)"
    bridge.init_app(celery_app("shop"))
    assert (bridge.name, bridge.options.name) == ("shop", "shop")


@pytest.mark.parametrize("name", [None, "", "shop.celery", "__main__", "a b", "x" * 65])
def test_an_app_whose_name_cannot_serve_asks_for_one(name: str | None) -> None:
    """`__main__` is called otherwise by the next command; a dotted name would be cut somewhere."""
    with pytest.raises(ConfigurationError, match=r"cannot name its bridge; give Bridge a name='...'"):
        Bridge(celery_app(name), URL)
    late = Bridge(None, URL)
    with pytest.raises(ConfigurationError, match="cannot name its bridge"):
        late.init_app(celery_app(name))
    assert Bridge(celery_app(name), URL, name="shop").name == "shop"


def test_a_second_bridge_of_an_app_needs_a_name() -> None:
    """As two of the same name always did."""
    app = celery_app("shop")
    Bridge(app, URL)
    with pytest.raises(ConfigurationError, match="already has a bridge named 'shop'"):
        Bridge(app, URL)


def _definitions(app: str | None, **tasks: str) -> Definitions:
    return Definitions(app, tasks, dict.fromkeys(tasks, "digest"), "all")


@pytest.mark.parametrize(
    ("mine", "is_other"),
    [
        (_definitions("shop", summarise="shop.changes.summarise"), False),
        (_definitions("shop", summarise="moved.elsewhere.summarise"), False),
        (_definitions("shop", renamed="shop.changes.renamed"), False),
        (_definitions(None, summarise="shop.changes.summarise"), False),
        (_definitions("billing", summarise="shop.changes.summarise"), True),
        (_definitions("shop", invoice="billing.changes.invoice"), True),
        (_definitions(None, invoice="billing.changes.invoice"), True),
    ],
)
def test_another_app_is_told_by_its_name_or_by_having_nothing_in_common(mine: Definitions, is_other: bool) -> None:
    """A deploy that renames or moves a handler is no other app; a lease of an earlier version says nothing."""
    lease = {"app": "shop", "tasks": {"summarise": "shop.changes.summarise"}}
    assert is_other_app(lease, mine) is is_other
    assert not is_other_app({}, mine)


def _defined(options: Mapping[str, Any] | None = None, **handler: object) -> Definitions:
    bridge = Bridge(celery_app("shop"), URL, autodiscover=False, **(options or {}))
    bridge.on_change("shop.orders", **{"name": "summarise", **handler})(handle)  # type: ignore[arg-type]
    return definitions_of(bridge.wiring, bridge.wiring.stream()[0])


def test_definitions_are_the_same_in_every_process_and_other_after_every_change() -> None:
    """Sets have no order, and what two processes both do must not look different."""
    plain = _defined(operations=["insert", "update"], match={"$gt": ["$x", 1]})
    assert plain == _defined(operations={"update", "insert"}, match={"$gt": ["$x", 1]})
    others = [
        _defined(operations=["insert"], match={"$gt": ["$x", 1]}),
        _defined(operations=["insert", "update"], match={"$gt": ["$x", 2]}),
        _defined(operations=["insert", "update"], match={"$gt": ["$x", 1]}, fields={"x"}),
        _defined(operations=["insert", "update"], match={"$gt": ["$x", 1]}, transactional=True),
        _defined(operations=["insert", "update"], match={"$gt": ["$x", 1]}, failure_policy="skip"),
        _defined(operations=["insert", "update"], match={"$gt": ["$x", 1]}, name="other"),
        _defined(operations=["insert", "update"], match={"$gt": ["$x", 1]}, group="slow"),
    ]
    assert len({plain.digest, *(each.digest for each in others)}) == len(others) + 1


def test_an_option_of_the_stream_makes_other_definitions() -> None:
    """Each one that decides what is read, or where it runs."""
    options: list[dict[str, Any]] = [
        {},
        {"partitions": 5},
        {"queues": 3},
        {"full_document": "whenAvailable"},
        {"full_document_before_change": "whenAvailable"},
        {"show_expanded_events": True},
        {"pipeline": [{"$match": {"operationType": "insert"}}]},
    ]
    assert len({_defined(each).digest for each in options}) == len(options)
