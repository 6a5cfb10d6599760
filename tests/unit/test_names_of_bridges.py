"""Names of bridges: the app's own, or a given one; never a surprise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from celery import Celery

from mongo_celery import Bridge
from mongo_celery.bridge.identity import Identity, build_identity
from mongo_celery.broker.connection import Address, describe_broker, is_same_broker, read_address
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
    assert Bridge(celery_app("shop"), URL).options.queue_name(0) == "shop.0"
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
    with pytest.raises(ConfigurationError, match=r"name='...'"):
        Bridge(celery_app(name), URL)
    late = Bridge(None, URL)
    with pytest.raises(ConfigurationError, match=r"name='...'"):
        late.init_app(celery_app(name))
    assert Bridge(celery_app(name), URL, name="shop").name == "shop"


def _broker(url: str | list[str], **options: str) -> Address:
    app = Celery("shop", broker_url=url, broker_transport_options=options, set_as_current=False)
    found = read_address(app)
    assert found is not None
    return found


SOCKET = "redis+socket:///run/redis.sock"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("memory://", "memory://"),
        ("redis://localhost", "redis://:secret@LOCALHOST:6379/0"),
        ("redis://a:6379/3", "rediss://user:secret@a:6379/3?ssl_cert_reqs=required"),
        (SOCKET, f"{SOCKET}?virtual_host=0"),
        ("sentinel://a:26379;sentinel://b:26379", "sentinel://:secret@b:26379"),
        ("amqp://", "amqp://guest:guest@localhost//"),
        ("amqp://a/shop", "pyamqp://user:secret@a:5672/shop"),
        (["amqp://a/shop", "amqp://b/shop"], ["amqp://user:secret@c/shop", "amqp://b/shop"]),
    ],
)
def test_one_broker_is_known_under_each_of_its_addresses(one: str | list[str], other: str | list[str]) -> None:
    """With TLS or without, whatever the login; a cluster that has one host in common is the same."""
    assert is_same_broker(_broker(one), _broker(other))
    assert "secret" not in f"{describe_broker(_broker(other))}{_broker(other)}"


@pytest.mark.parametrize(
    ("one", "other", "options"),
    [
        ("redis://a/0", "redis://a/1", {}),
        ("redis://a/0", "redis://b/0", {}),
        ("redis://a/0", "redis://a:6380/0", {}),
        ("redis://localhost/0", "redis://127.0.0.1/0", {}),
        ("redis://a/0", "redis://a/0", {"global_keyprefix": "staging:"}),
        (SOCKET, f"{SOCKET}?virtual_host=1", {}),
        ("amqp://a/shop", "amqp://a/staging", {}),
        ("amqp://a", "redis://a", {}),
        ("memory://", "redis://localhost", {}),
    ],
)
def test_another_host_database_or_prefix_is_another_broker(one: str, other: str, options: dict[str, str]) -> None:
    """An alias of a host, too: nobody can know that it is one."""
    assert not is_same_broker(_broker(one), _broker(other, **options))


def test_a_broker_whose_url_cannot_be_read_is_no_difference() -> None:
    """The first connection names it."""
    assert read_address(Celery("shop", broker="nosuch://a", set_as_current=False)) is None


def _identity(
    app: str | None, broker: Address | None = None, databases: tuple[str, ...] = ("shop",), **tasks: str
) -> Identity:
    return Identity(
        app, broker, {name: {"task": task, "databases": [*databases], "digest": "1"} for name, task in tasks.items()}
    )


A, B = ({"transport": "redis", "hosts": [host], "database": "0", "options": {}} for host in ("a:6379", "b:6379"))
STORED = _identity("shop", A, ("shop", "audit"), summarise="shop.changes.summarise").plain()


@pytest.mark.parametrize(
    ("mine", "named"),
    [
        (_identity("shop", A, summarise="shop.changes.summarise"), ()),
        (_identity("shop", A, summarise="moved.elsewhere.summarise"), ()),
        (_identity("shop", A, ("staging",), renamed="shop.changes.renamed"), ()),
        (_identity("shop", A, ("*",), summarise="shop.changes.summarise"), ()),
        (_identity("shop", None, summarise="shop.changes.summarise"), ()),
        (_identity(None, A, summarise="shop.changes.summarise"), ()),
        (_identity("billing", A, summarise="shop.changes.summarise"), ("shop", "billing")),
        (_identity("shop", A, invoice="billing.changes.invoice"), ("summarise",)),
        (_identity(None, A, invoice="billing.changes.invoice"), ("summarise",)),
        (_identity("shop", B, summarise="shop.changes.summarise"), ("redis://a:6379/0", "redis://b:6379/0")),
        (
            _identity("shop", A, ("staging",), summarise="shop.changes.summarise"),
            ("shop, audit", "staging", "summarise"),
        ),
    ],
)
def test_another_app_or_environment_is_told_by_name_broker_and_databases(
    mine: Identity, named: tuple[str, ...]
) -> None:
    """P9: both are named. A deploy that renames, moves, adds or removes handlers is no other environment."""
    difference = mine.difference(STORED)
    assert (difference is None) is (not named)
    assert all(each in (difference or "") for each in named)
    assert mine.difference(None) is None


def _defined(options: Mapping[str, Any] | None = None, **handler: object) -> Identity:
    bridge = Bridge(celery_app("shop"), URL, autodiscover=False, **(options or {}))
    bridge.on_change("shop.orders", **{"name": "summarise", **handler})(handle)  # type: ignore[arg-type]
    return build_identity(bridge.wiring)


def test_definitions_are_the_same_in_every_process_and_other_after_every_change() -> None:
    """Sets have no order, and what two processes both do must not look different."""
    plain = _defined(operations=["insert", "update"], match={"$gt": ["$fullDocument.x", 1]})
    assert plain == _defined(operations={"update", "insert"}, match={"$gt": ["$fullDocument.x", 1]})
    assert plain.find_changed_handlers(plain.plain()) == []
    others = [
        _defined(operations=["insert"], match={"$gt": ["$fullDocument.x", 1]}),
        _defined(operations=["insert", "update"], match={"$gt": ["$fullDocument.x", 2]}),
        _defined(operations=["insert", "update"], match={"$gt": ["$fullDocument.x", 1]}, fields={"x"}),
        _defined(operations=["insert", "update"], match={"$gt": ["$fullDocument.x", 1]}, transactional=True),
        _defined(operations=["insert", "update"], match={"$gt": ["$fullDocument.x", 1]}, failure_policy="skip"),
        _defined(operations=["insert", "update"], match={"$gt": ["$fullDocument.x", 1]}, group="slow"),
    ]
    assert all(each.find_changed_handlers(plain.plain()) == ["summarise"] for each in others)
