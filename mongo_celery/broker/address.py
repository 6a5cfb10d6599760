"""
The address of a broker, without credentials: by it two processes see that they publish to the same one.

It is a document of `transport` (`redis`, `amqp`, `memory` and so on, with TLS or without), `hosts` (each with its port,
or the path of a socket), `database` (or virtual host), and `options`: transport options that separate the users of one
server.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

if TYPE_CHECKING:
    from celery import Celery
    from kombu import Connection

_OPTIONS = ("global_keyprefix", "queue_name_prefix", "master_name", "region")

Address = Mapping[str, Any]


def read_address(app: Celery) -> Address | None:
    """Return the address to which an app publishes, without connecting; None where its URL cannot be read."""
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
    """Return True if both are one broker: a cluster that gains or loses a host stays the same."""
    is_alike = all(one[name] == other[name] for name in ("transport", "database", "options"))
    return is_alike and (one["hosts"] == other["hosts"] or bool({*one["hosts"]} & {*other["hosts"]}))


def describe_broker(address: Address) -> str:
    """Return an address as a URL, and its options."""
    options = ", ".join(f"{name} {value}" for name, value in address["options"].items())
    text = f"{address['transport']}://{','.join(address['hosts'])}/{address['database'].removeprefix('/')}"
    return f"{text} ({options})" if options else text


def _read_host(connection: Connection) -> str:
    """Return host and port, or the path of a socket. Some transports keep a whole URL in the place of the host."""
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
