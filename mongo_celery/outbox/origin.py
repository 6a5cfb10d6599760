"""
The origin of an entry: the app and the broker of its writer.

Apps that share a collection and a broker deliver each other's entries. With another broker an entry waits for its app,
because here it would reach no worker, or wrong ones. An app with the same name always delivers it: its broker may have
moved, or have another address there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mongo_celery.app import app_name
from mongo_celery.broker.connection import describe_broker, read_address
from mongo_celery.mongo.expressions import literal
from mongo_celery.outbox.claims import HEAD

if TYPE_CHECKING:
    from celery import Celery

    from mongo_celery.outbox.entries import Entry


class OtherBrokerError(Exception):
    """An entry belongs to another app with another broker, and waits for a process of that app."""


@dataclass(frozen=True, slots=True)
class EntryOrigin:
    """
    The origin of one app's entries in this process.

    Attributes:
        app: name of the app. Empty if it has none.
        broker: address of the broker, without credentials. Empty if the URL cannot be read.
    """

    app: str
    broker: str

    def stamp(self, entry: Entry) -> Entry:
        """Give a new entry this origin, and return it."""
        entry.app, entry.broker = self.app, self.broker
        return entry

    def check(self, entry: Entry) -> None:
        """
        Refuse an entry that this app must not publish.

        Raises:
            OtherBrokerError: it was written by another app with another broker.
        """
        if entry.app != self.app and entry.broker != self.broker and (entry.app or entry.broker):
            raise OtherBrokerError(
                f"app {entry.app or 'without a name'} wrote the entry for {entry.broker or 'another broker'}, "
                f"but app {self.app or 'without a name'} publishes to {self.broker or 'another'}"
            )

    def match_other(self) -> dict[str, Any]:
        """Return an expression: `check` refuses the next entry of a document."""
        app, broker = ({"$ifNull": [f"$$head.{name}", ""]} for name in ("app", "broker"))
        is_other = [
            {"$ne": [app, literal(self.app)]},
            {"$ne": [broker, literal(self.broker)]},
            {"$ne": [[app, broker], ["", ""]]},
        ]
        return {"$let": {"vars": {"head": HEAD}, "in": {"$and": is_other}}}


def read_origin(app: Celery) -> EntryOrigin:
    """Return the origin of an app's entries, without connecting."""
    address = read_address(app)
    return EntryOrigin(app_name(app) or "", "" if address is None else describe_broker(address))
