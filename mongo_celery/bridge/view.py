"""
A handler's view of what this package keeps in users' documents: which outboxes there are, and what stays out of sight.

Fields of ours are not in the documents of a change, unless the handler asks for them (`bookkeeping=True`, or `fields=`
with their names). Names are compared first, since most documents have none of them: an outbox whose collection nobody
needs is not opened.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from celery import Celery

from mongo_celery.bridge.change import read_namespace
from mongo_celery.bridge.stream.bookkeeping import (
    DESCRIPTION,
    DOCUMENTS,
    KNOWN_BY_FORM,
    Bookkeeping,
    find_touched_fields,
    hide_fields,
)
from mongo_celery.bridge.stream.filter import Filter
from mongo_celery.mongo.redaction import short
from mongo_celery.outbox import Outbox
from mongo_celery.outbox.outbox import OUTBOXES
from mongo_celery.outbox.registry import AnyOutbox

logger = logging.getLogger("mongo_celery.listener")


class AppOutboxes:
    """
    The outboxes of an app, by the collections in which they keep entries.

    Args:
        app: the Celery app; outboxes may be added to it at any time.
    """

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._names: dict[int, Sequence[str]] = {}
        self._failed: set[int] = set()

    def bookkeeping(self) -> Bookkeeping:
        """Return what the outboxes keep; one whose collection cannot be had is logged, and left out."""
        fields: dict[str, set[str]] = {}
        collections: set[str] = set()
        for outbox in OUTBOXES.of(self._app):
            for name in self._collection_names(outbox):
                if isinstance(outbox, Outbox):
                    fields.setdefault(name, set()).add(outbox.field.name)
                else:  # its entries lie in collections of their own
                    collections.add(name)
        return Bookkeeping({name: frozenset(found) for name, found in fields.items()}, frozenset(collections))

    def on(self, namespace: str, fields: Container[str] | None = None) -> list[Outbox]:
        """
        Return the outboxes that keep their entries in the documents of a collection.

        Args:
            namespace: full name of the collection.
            fields: only those with one of these fields; none of the others is opened. None for all.
        """
        found = [outbox for outbox in OUTBOXES.of(self._app) if isinstance(outbox, Outbox)]
        asked = [outbox for outbox in found if fields is None or outbox.field.name in fields]
        return [outbox for outbox in asked if namespace in self._collection_names(outbox)]

    def _collection_names(self, outbox: AnyOutbox) -> Sequence[str]:
        """Return the full names of its collections, asked for until they are known."""
        key = id(outbox)  # the app keeps it
        if key not in self._names:
            try:
                self._names[key] = [outbox.collection.full_name]
            except Exception as error:  # noqa: BLE001 - a user's function may raise whatever it likes
                if key not in self._failed:
                    self._failed.add(key)
                    logger.warning(
                        "the collection of %r cannot be had (%s): handlers run for what it keeps there, too",
                        outbox, short(error),
                        extra={"event": "outbox_unknown"},
                    )  # fmt: skip
                return ()
        return self._names[key]


@dataclass(frozen=True, slots=True)
class HandlerView:
    """
    A handler's view of the fields that this package keeps.

    Args:
        outboxes: of the app.
        filter: of the handler.
    """

    outboxes: AppOutboxes
    filter: Filter

    def get_field(self, event: Mapping[str, Any], name: str) -> Any:
        """Return a field of an event; where it holds fields of a document, without those the handler does not see."""
        value = event[name]
        if self.filter.bookkeeping or name not in DOCUMENTS or not isinstance(value, Mapping):
            return value
        fields, namespace = find_touched_fields(value) if name == DESCRIPTION else value, read_namespace(event)
        outboxes = [outbox.field.name for outbox in self.outboxes.on(namespace, fields)]
        if not outboxes and KNOWN_BY_FORM.isdisjoint(fields):
            return value
        return hide_fields(event, name, outboxes, self.filter.asks_for_field)

    def find_outboxes(self, namespace: str) -> Sequence[Outbox]:
        """Return the app's outboxes that keep their entries in the documents of a collection."""
        return self.outboxes.on(namespace)
