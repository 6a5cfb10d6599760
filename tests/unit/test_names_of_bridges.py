"""Names of bridges: the app's own, or a given one; never a surprise."""

from __future__ import annotations

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


def test_a_bridge_is_called_like_its_app() -> None:
    """So two apps on one cluster do not share a bridge by forgetting a name."""
    assert Bridge(celery_app("shop"), URL).options.queue_name(0) == "shop.0"
    assert Bridge(celery_app("shop"), URL, name="orders").options.name == "orders"
    late = Bridge(None, URL)
    late.on_change("shop.orders")(handle)
    late.init_app(celery_app("shop"))
    assert (late.name, late.options.name) == ("shop", "shop")


@pytest.mark.parametrize("name", [None, "", "shop.celery", "__main__", "a b", "x" * 65])
def test_an_app_whose_name_cannot_serve_asks_for_one(name: str | None) -> None:
    """`__main__` is called otherwise by the next command; a dotted name would be cut somewhere."""
    with pytest.raises(ConfigurationError, match="name="):
        Bridge(celery_app(name), URL)
    with pytest.raises(ConfigurationError, match="name="):
        Bridge(None, URL).init_app(celery_app(name))
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
        ("redis://a/0", "redis://a/0", {"global_keyprefix": "staging:"}),
        (SOCKET, f"{SOCKET}?virtual_host=1", {}),
        ("amqp://a/shop", "amqp://a/staging", {}),
        ("amqp://a", "redis://a", {}),
    ],
)
def test_another_host_database_or_prefix_is_another_broker(one: str, other: str, options: dict[str, str]) -> None:
    assert not is_same_broker(_broker(one), _broker(other, **options))
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
        (_identity("shop", None, summarise="shop.changes.summarise"), ()),
        (_identity(None, A, summarise="shop.changes.summarise"), ()),
        (_identity("billing", A, summarise="shop.changes.summarise"), ("shop", "billing")),
        (_identity("shop", A, invoice="billing.changes.invoice"), ("summarise",)),
        (_identity("shop", B, summarise="shop.changes.summarise"), ("redis://a:6379/0", "redis://b:6379/0")),
        (_identity("shop", A, ("staging",), summarise="shop.changes.summarise"), ("shop, audit", "staging")),
    ],
)
def test_another_app_or_environment_is_named(mine: Identity, named: tuple[str, ...]) -> None:
    """P9: both are named. A deploy that renames, moves, adds or removes handlers is no other environment."""
    difference = mine.difference(STORED)
    assert (difference is None) is (not named)
    assert all(each in (difference or "") for each in named)
    assert mine.difference(None) is None


def _defined(**handler: Any) -> Identity:
    bridge = Bridge(celery_app("shop"), URL, autodiscover=False)
    bridge.on_change("shop.orders", name="summarise", **handler)(handle)
    return build_identity(bridge.wiring)


def test_definitions_are_the_same_in_every_process_and_other_after_every_change() -> None:
    """Sets have no order, and what two processes both do must not look different."""
    given: dict[str, Any] = {"operations": ["insert", "update"], "match": {"$gt": ["$fullDocument.x", 1]}}
    plain = _defined(**given)
    assert plain == _defined(**{**given, "operations": {"update", "insert"}})
    assert plain.find_changed_handlers(plain.plain()) == []
    changes: list[dict[str, Any]] = [
        {"operations": ["insert"]},
        {"match": {"$gt": ["$fullDocument.x", 2]}},
        *({"fields": {"x"}}, {"transactional": True}, {"failure_policy": "skip"}, {"group": "slow"}),
    ]
    found = [_defined(**{**given, **each}).find_changed_handlers(plain.plain()) for each in changes]
    assert found == [["summarise"]] * len(changes)
