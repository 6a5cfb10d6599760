"""The address of a broker, without credentials: by it two processes see that they publish to the same one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import parse_qs, urlsplit

if TYPE_CHECKING:
    from celery import Celery
    from kombu import Connection

_OPTIONS = ("global_keyprefix", "queue_name_prefix", "master_name", "region")
"""Transport options that separate the users of one server."""


@dataclass(frozen=True, slots=True)
class BrokerAddress:
    """
    The place of an app's queues.

    Attributes:
        transport: `redis`, `amqp`, `memory` and so on, with TLS or without.
        hosts: each with its port, or the path of a socket.
        database: database or virtual host.
        options: transport options that separate the users of one server.
    """

    transport: str
    hosts: tuple[str, ...]
    database: str
    options: Mapping[str, str]

    @classmethod
    def of(cls, app: Celery) -> Self | None:
        """Return the address to which an app publishes, without connecting; None where its URL cannot be read."""
        try:
            with app.connection_for_write() as connection:
                return cls._of_connection(connection, app.conf.broker_transport_options or {})
        except Exception:  # noqa: BLE001 - kombu's transports raise what they like; the first connection names it
            return None

    @classmethod
    def _of_connection(cls, connection: Connection, options: Mapping[str, Any]) -> Self:
        transport = connection.transport.driver_type
        database = _database(connection)
        if transport == "redis" and database == "/":
            database = "0"
        others = (connection.clone(hostname=url) for url in connection.alt or ())
        hosts = {_host(each) for each in (connection, *others)} - {""}
        chosen = {name: str(options[name]) for name in _OPTIONS if options.get(name)}
        return cls(transport, tuple(sorted(hosts)), database, chosen)

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> Self:
        """Return the address that `plain` gave."""
        return cls(plain["transport"], tuple(plain["hosts"]), plain["database"], plain["options"])

    def plain(self) -> dict[str, Any]:
        """Return it as MongoDB keeps it."""
        return {**asdict(self), "hosts": list(self.hosts)}

    def is_same(self, other: BrokerAddress) -> bool:
        """Return True if both are one broker: a cluster that gains or loses a host stays the same."""
        mine, theirs = ((each.transport, each.database, each.options) for each in (self, other))
        return mine == theirs and (self.hosts == other.hosts or bool({*self.hosts} & {*other.hosts}))

    def __str__(self) -> str:
        text = f"{self.transport}://{','.join(self.hosts)}/{self.database.removeprefix('/')}"
        return (
            f"{text} ({', '.join(f'{name} {value}' for name, value in self.options.items())})" if self.options else text
        )


def _host(connection: Connection) -> str:
    """Return host and port, or the path of a socket. Some transports keep a whole URL in the place of the host."""
    given = connection.hostname or ""
    if "://" in given:
        parts = urlsplit(given)
        return f"{parts.netloc.rpartition('@')[2]}{parts.path}"
    defaults = connection.transport.default_connection_params
    host = given or defaults.get("hostname") or ""
    port = connection.port or defaults.get("port")
    return f"{host}:{port}" if host and port else host


def _database(connection: Connection) -> str:
    named = parse_qs(urlsplit(connection.hostname or "").query).get("virtual_host")
    return named[0] if named else str(connection.virtual_host or "/")
