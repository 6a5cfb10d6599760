"""
Connections to the broker, and its address.

Connections have time limits, so a frozen server cannot block a process forever. An address contains no credentials, and
shows if two processes publish to the same broker. It is a document with `transport` (`redis`, `amqp`, `memory` and so
on, with or without TLS), `hosts` (each with its port, or a socket path), `database` (or virtual host), and `options`:
transport options that separate users of one server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qs, urlsplit

from celery import Celery
from kombu import Connection

from mongo_celery.errors import ConfigurationError
from mongo_celery.mongo.redaction import short

_BOUNDS = {
    "redis": ("socket_timeout", "socket_connect_timeout"),
    "amqp": ("read_timeout", "write_timeout"),
}
"""The options that limit a call's time, by transport."""

_OPTIONS = ("global_keyprefix", "queue_name_prefix", "master_name", "region")

Address = Mapping[str, Any]


def write_connection(app: Celery, **options: Any) -> Connection:
    """
    Return a new connection of the app for publishing.

    Raises:
        ConfigurationError: `broker_url` is not a URL, or kombu refuses it. For an unreadable URL the message shows none
            of it: kombu's message shows a part of a password with an unescaped `/`.
    """
    try:
        return app.connection_for_write(**options)
    except ValueError:
        raise ConfigurationError(
            "broker_url is not valid: its host or port cannot be read. Often a character of its password is not "
            "escaped. Write the password as urllib.parse.quote(password, safe='')."
        ) from None
    except (KeyError, TypeError) as error:  # kombu does not know the URL's transport or an option
        raise ConfigurationError(
            f"Kombu refuses broker_url: {short(error)}. Put options of the connection into broker_transport_options."
        ) from None


def bounded_connection(app: Celery, seconds: int, *, confirm: bool = False, as_text: bool = False) -> Connection:
    """
    Return a new connection for publishing. Each of its calls has a time limit.

    By default neither Redis nor RabbitMQ has one. The app's `broker_transport_options` take precedence.

    Args:
        app: the Celery app, for its broker.
        seconds: the time limit of a call.
        confirm: True if RabbitMQ confirms each message. Redis always answers.
        as_text: True to send bodies, which are JSON, to Redis unchanged. Otherwise kombu encodes them in base64, which
            only bytes need and which takes a third more space. Each message tells consumers its encoding.
    """
    with write_connection(app) as plain:
        kind = plain.transport.driver_type
    given = app.conf.broker_transport_options or {}
    bounds: dict[str, Any] = {name: seconds for name in _BOUNDS.get(kind, ()) if name not in given}
    if confirm and kind == "amqp":
        bounds.setdefault("confirm_publish", given.get("confirm_publish", True))
    if as_text and kind == "redis" and "body_encoding" not in given and not app.conf.task_compression:
        bounds["body_encoding"] = None
    return write_connection(app, connect_timeout=seconds, transport_options=bounds)


def demand_answer(connection: Connection, seconds: int) -> None:
    """Wait until one of the broker's servers answers, each within a time limit. Raises the transport's error."""
    retries = count_retries(connection)
    connection.ensure_connection(
        max_retries=retries, interval_start=0, interval_step=0, timeout=seconds * max(retries - 1, 1)
    )


def count_retries(connection: Connection) -> int:
    """
    Return the number of retries of a connection: one for each server in `broker_url`, and two for a
    single server.
    """
    return max(1, len(connection.alt))


def reach_broker(app: Celery, seconds: int) -> None:
    """Open a new connection to the broker within a time limit. Raises the transport's error."""
    with bounded_connection(app, seconds) as connection:
        demand_answer(connection, seconds)


def declare_queues(app: Celery, names: Sequence[str]) -> None:
    """Add the partition queues to this app, in addition to its other queues."""
    for name in names:
        if name not in app.amqp.queues:
            app.amqp.queues.select_add(app.amqp.queues.new_missing(name))


def read_address(app: Celery) -> Address | None:
    """Return an app's broker address without connecting. None if its URL cannot be read."""
    options = app.conf.broker_transport_options or {}
    try:
        with app.connection_for_write() as connection:
            transport, database = connection.transport.driver_type, _read_database(connection)
            others = (connection.clone(hostname=url) for url in connection.alt or ())
            return {
                "transport": transport,
                "hosts": sorted({_read_host(each) for each in (connection, *others)} - {""}),
                "database": "0" if transport == "redis" and database == "/" else database,
                "options": {name: str(options[name]) for name in _OPTIONS if options.get(name)},
            }
    except Exception:  # noqa: BLE001 - kombu's transports raise what they like; the first connection names it
        return None


def is_same_broker(one: Address, other: Address) -> bool:
    """Return True if both are the same broker. A cluster that gains or loses a host stays the same."""
    is_alike = all(one[name] == other[name] for name in ("transport", "database", "options"))
    return is_alike and (one["hosts"] == other["hosts"] or bool({*one["hosts"]} & {*other["hosts"]}))


def describe_broker(address: Address) -> str:
    """Return an address as a URL with its options."""
    options = ", ".join(f"{name} {value}" for name, value in address["options"].items())
    text = f"{address['transport']}://{','.join(address['hosts'])}/{address['database'].removeprefix('/')}"
    return f"{text} ({options})" if options else text


def _read_host(connection: Connection) -> str:
    """Return host and port, or a socket path. Some transports put a whole URL into the host."""
    given = connection.hostname or ""
    if "://" in given:
        parts = urlsplit(given)
        return f"{parts.netloc.rpartition('@')[2]}{parts.path}"
    defaults = connection.transport.default_connection_params
    host = given or defaults.get("hostname") or ""
    port = connection.port or defaults.get("port")
    return f"{host}:{port}" if host and port else host


def _read_database(connection: Connection) -> str:
    named = parse_qs(urlsplit(connection.hostname or "").query).get("virtual_host")
    return named[0] if named else str(connection.virtual_host or "/")
