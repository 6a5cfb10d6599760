"""
The snapshots with which subscriptions begin: `start_from="snapshot"`.

The start is pinned first, and says in the same write that snapshots are owed. So all that is written from then on is in
the stream. Then they are asked for, one for each collection that there is: one that is made later is in the stream from
its first document on. Their names are made of that start and the collection, so a term that ends in between leaves to
the next one what it has not asked for, and nothing is asked for twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pymongo

from mongo_celery.mongo.opening import ANSWER_SECONDS

if TYPE_CHECKING:
    from bson import Timestamp

    from mongo_celery.bridge.listener.subscription import TermFacts
    from mongo_celery.bridge.stream.source import Source
    from mongo_celery.bridge.wiring import Wiring

_OF_THE_SERVER = frozenset({"admin", "config", "local"})


class InitialSnapshots:
    """
    The snapshots that the subscriptions of one term begin with. Used by one thread.

    Args:
        owed: plans of those to which snapshots are owed, each with the start that was pinned with that. (The start
            itself goes back with a rewind.)
    """

    def __init__(self, wiring: Wiring, owed: Iterable[tuple[TermFacts, Timestamp]]) -> None:
        self._wiring = wiring
        self._owed = list(owed)

    def request(self) -> None:
        """
        Ask for what is owed.

        Raises:
            PyMongoError: what is left is still owed. To be called again.
        """
        store = self._wiring.store
        while self._owed:
            plan, start = self._owed[0]
            name = plan.handler.name
            pinned = f"{start.time:08x}{start.inc:08x}"
            with pymongo.timeout(ANSWER_SECONDS):
                sources = plan.selector.sources
                found = sorted({each for source in sources for each in find_collections(self._wiring, source)})
            store.snapshots.insert(
                {
                    "_id": store.snapshots.make_id(name, f"{pinned}-{_brief(source)}"),
                    "source": source,
                    "by": "start_from='snapshot'",
                }
                for source in found
            )
            store.subscriptions.note_snapshot(name, plan.version)
            del self._owed[0]


def find_collections(wiring: Wiring, source: Source) -> Iterator[str]:
    """Namespaces of the collections of a source that there are. One that is named may come later."""
    if source.collection is not None:
        yield str(source)
        return
    client = wiring.client
    databases = [source.database] if source.database is not None else client.list_database_names()
    for database in databases:
        if database is None or database in _OF_THE_SERVER or database == wiring.options.database:
            continue
        for name, kind in _kinds(client, database):
            if kind == "collection" and not name.startswith("system.") and source.covers(database, name):
                yield f"{database}.{name}"


def _kinds(client: Any, database: str) -> Iterator[tuple[str, str]]:
    """The collections of a database, and what each is."""
    found: Iterable[Mapping[str, Any]] = client[database].list_collections()
    return ((each["name"], each.get("type", "collection")) for each in found)


def _brief(source: str) -> str:
    return hashlib.blake2b(source.encode(), digest_size=6).hexdigest()
