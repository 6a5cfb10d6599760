"""
A handler's view of documents without this package's own fields, and the app's outboxes.

Documents of a change come without these fields, unless the handler requests them (`bookkeeping=True`, or `fields=` with
their names). Most documents have none, so names are compared first. An outbox's collection is opened only if needed.
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
from mongo_celery.outbox.idempotency import IDEMPOTENCY_STORES, IdempotencyStore
from mongo_celery.outbox.pending import FIELD
from mongo_celery.outbox.registry import OUTBOXES, BaseOutbox
from mongo_celery.twophase.twophase import TWO_PHASE_COMMITS, TwoPhaseCommit, list_namespaces

logger = logging.getLogger("mongo_celery.listener")


class AppOutboxes:
    """
    The outboxes of an app, by the collections in which they keep entries.

    Args:
        app: the Celery app. It may get more outboxes at any time.
    """

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._names: dict[int, Sequence[str]] = {}
        self._failed: set[int] = set()

    def bookkeeping(self, *, watches_databases: bool = False) -> Bookkeeping:
        """
        Return the fields and collections that this package maintains for the app.

        If an outbox's collection cannot be opened, log that and leave it out.

        Args:
            watches_databases: True if a handler watches a whole database. Then include the collections of `once` and of
                two-phase commit.
        """
        fields: dict[str, set[str]] = {}
        collections: set[str] = set()
        for outbox in OUTBOXES.of(self._app):
            for name in self._read_names(outbox):
                if isinstance(outbox, Outbox):
                    fields.setdefault(name, set()).add(FIELD)
                else:  # its entries are in separate collections
                    collections.add(name)
        if watches_databases:
            keepers: list[IdempotencyStore | TwoPhaseCommit] = [*IDEMPOTENCY_STORES, *TWO_PHASE_COMMITS.of(self._app)]
            collections.update(*map(self._read_names, keepers))
        return Bookkeeping({name: frozenset(found) for name, found in fields.items()}, frozenset(collections))

    def on(self, namespace: str, fields: Container[str] | None = None) -> list[Outbox]:
        """
        Return the outboxes that keep their entries in the documents of a collection.

        Args:
            namespace: full name of the collection.
            fields: include an outbox only if its field is among these. None for all outboxes.
        """
        if fields is not None and FIELD not in fields:
            return []
        found = [outbox for outbox in OUTBOXES.of(self._app) if isinstance(outbox, Outbox)]
        return [outbox for outbox in found if namespace in self._read_names(outbox)]

    def _read_names(self, keeper: BaseOutbox | IdempotencyStore | TwoPhaseCommit) -> Sequence[str]:
        """Return the full names of a keeper's collections. It looks the names up until they are known."""
        key = id(keeper)  # the app holds a reference to it
        if key not in self._names:
            try:
                self._names[key] = _list_namespaces(keeper)
            except Exception as error:  # noqa: BLE001 - a user's function may raise whatever it likes
                if key not in self._failed:
                    self._failed.add(key)
                    logger.warning(
                        "the collection of %r cannot be opened, so handlers also get its bookkeeping changes: %s",
                        keeper, short(error),
                        extra={"event": "bookkeeping_unknown"},
                    )  # fmt: skip
                return ()
        return self._names[key]


def _list_namespaces(keeper: BaseOutbox | IdempotencyStore | TwoPhaseCommit) -> Sequence[str]:
    if isinstance(keeper, TwoPhaseCommit):
        return list_namespaces(keeper)
    return keeper.full_names if isinstance(keeper, IdempotencyStore) else [keeper.collection.full_name]


@dataclass(frozen=True, slots=True)
class HandlerView:
    """
    A handler's view of documents without this package's own fields.

    Args:
        outboxes: the app's outboxes.
        filter: the handler's filter.
    """

    outboxes: AppOutboxes
    filter: Filter

    def get_field(self, event: Mapping[str, Any], name: str) -> Any:
        """Return a field of an event, without the document fields that the handler does not see."""
        value = event[name]
        if self.filter.bookkeeping or name not in DOCUMENTS or not isinstance(value, Mapping):
            return value
        fields, namespace = find_touched_fields(value) if name == DESCRIPTION else value, read_namespace(event)
        outboxes = [FIELD for _ in self.outboxes.on(namespace, fields)]
        if not outboxes and KNOWN_BY_FORM.isdisjoint(fields):
            return value
        return hide_fields(event, name, outboxes, self.filter.asks_for_field)

    def find_outboxes(self, namespace: str) -> Sequence[Outbox]:
        """Return the app's outboxes that keep their entries in the documents of a collection."""
        return self.outboxes.on(namespace)
