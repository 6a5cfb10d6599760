"""
Whether a bridge writes what the models allow: its state is recorded, and each write judged by their relation.

The recording is the change stream of a state database: the events of a cluster are in one order that no clock and no
process can dispute. Each document is followed from event to event, and seen as the models see it
(`tests/property/relation.py`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from bson import Timestamp
from pymongo import MongoClient

from mongo_celery.bridge.existing import token_place
from tests.property import relation
from tests.property.relation import Claim, Handled, Handler, Key, Lease, Letter, Partition, StoredChange, Write, judge
from tests.rig.oplog import follow

Event = Mapping[str, Any]
Stored = dict[str, Any]

LARGE = ["fullDocument.text", "fullDocument.raw", "fullDocument.zip", "fullDocument.change", "fullDocument.traceback"]
"""Fields of events that no judgement needs, and that may have megabytes."""

_WRITES = frozenset({"insert", "update", "replace", "delete"})
_GONE = frozenset({"drop", "dropDatabase", "rename"})


class Recording:
    """
    Takes in the events of a state database, in their order.

    Attributes:
        steps: how often each step was made.
        wrong: what no step explains.
    """

    def __init__(self) -> None:
        self.steps: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._stored: dict[Key, Stored] = {}
        self._seen: dict[str, dict[str, relation.Document]] = defaultdict(dict)
        self._changes: dict[str, list[str]] = defaultdict(list)
        self._transaction: list[Event] = []

    def note_change(self, handler: str, index: int, place: str) -> None:
        """Note a change that a handler, by its `_id`, is to handle in a partition."""
        found = self._seen["handlers"].get(handler)
        assert isinstance(found, Handler), "changes that nobody listens to are nobody's"
        self._changes[f"{handler}/{found.partitioning}/{index}"].append(token_place(place))

    def take(self, event: Event) -> None:
        """Take in an event. Those of a transaction are one write, which is judged when another one begins."""
        if self._transaction and transaction_of(event) != transaction_of(self._transaction[0]):
            self.end()
        if event["operationType"] in _GONE:
            self._forget(event)
        elif event["operationType"] in _WRITES and event["ns"]["coll"] in _VIEWS:
            if transaction_of(event) is None:
                self._judge([event])
            else:
                self._transaction.append(event)

    def end(self) -> None:
        events, self._transaction = self._transaction, []
        if events:
            self._judge(events)

    def _forget(self, event: Event) -> None:
        name = event["ns"].get("coll")
        for gone in [key for key in self._stored if name in (None, key[0])]:
            del self._stored[gone]
            self._seen[gone[0]].pop(gone[1], None)

    def _judge(self, events: list[Event]) -> None:
        written: list[tuple[Key, relation.Document | None]] = []
        terms = self._seen["leases"]
        for event in events:
            key = event["ns"]["coll"], str(event["documentKey"]["_id"])
            after = document_after(self._stored.get(key, {}), event)
            if after is None:
                self._stored.pop(key, None)
            else:
                self._stored[key] = after
            written.append((key, None if after is None else _VIEWS[key[0]](after, terms.get(key[1]))))
        found = judge(Write(self._seen, written, time_of(events[-1]), self._changes))
        self.steps.update(found.steps)
        self.wrong += found.complaints
        for (collection, id_), document in written:
            if document is None:
                self._seen[collection].pop(id_, None)
            else:
                self._seen[collection][id_] = document


def record(client: MongoClient[Stored], database: str, start: Timestamp) -> Recording:
    recording = Recording()
    for event in follow(client, start, database, without=LARGE):
        recording.take(event)
    recording.end()
    return recording


def transaction_of(event: Event) -> Any:
    return (event["txnNumber"], event["lsid"]["id"]) if "txnNumber" in event else None


def time_of(event: Event) -> float:
    """Return the time of a write by the server's clock: servers before 6.0 say only in which second it was."""
    wall = event.get("wallTime")
    return float(event["clusterTime"].time + 1) if wall is None else _seconds(wall)


def _seconds(time: datetime | None) -> float:
    return 0.0 if time is None else time.replace(tzinfo=UTC).timestamp()


def document_after(before: Stored, event: Event) -> Stored | None:
    if event["operationType"] == "delete":
        return None
    if event["operationType"] == "update":
        return updated(before, event["updateDescription"])
    return dict(event["fullDocument"])


def updated(before: Stored, description: Mapping[str, Any]) -> Stored:
    """Return a document after an update, from what the update has changed. The one before stays as it is."""
    after = dict(before)
    for path, value in description["updatedFields"].items():
        target, name = _within(after, path)
        if isinstance(target, list) and name == len(target):
            target.append(value)
        else:
            target[name] = value
    for each in description.get("truncatedArrays") or ():
        target, name = _within(after, each["field"])
        target[name] = target[name][: each["newSize"]]
    for path in description["removedFields"]:
        target, name = _within(after, path)
        target.pop(name, None)
    return after


def _within(document: Any, path: str) -> tuple[Any, Any]:
    """Return what a path leads into, a copy of its own, and the name there, or the place in an array."""
    *parents, last = path.split(".")
    for parent in parents:
        name: Any = int(parent) if isinstance(document, list) else parent
        inner = document[name] if isinstance(document, list) else document.get(name)
        document[name] = document = inner.copy() if isinstance(inner, dict | list) else {}
    return document, int(last) if isinstance(document, list) else last


# -- how the models see a document -----------------------------------------------------------------


def _place(document: Mapping[str, Any] | None) -> str:
    """Return the place that a document names by its resume token. Empty if it names none."""
    token = (document or {}).get("resumeToken") or {}
    return token_place(str(token.get("_data", "")))


def _lease(document: Stored, before: Any) -> Lease:
    terms = before.terms if isinstance(before, Lease) else frozenset()
    term = int(document["term"])
    return Lease(term, terms | {term}, document.get("listenerId"), _seconds(document.get("expiresAt")))


def _handler(document: Stored, _: Any) -> Handler:
    gaps = document.get("gaps") or [None]
    return Handler(int(document["term"]), _place(document), int(document["partitioning"]["term"]), str(gaps[-1]))


def _partition(document: Stored, _: Any) -> Partition:
    claim, handled = document.get("claim"), document.get("handled")
    return Partition(
        term=int(document["term"]),
        fence=int(document["fencingToken"]),
        committed=int(document["committed"]),
        place=_place(document),
        mark=token_place((document.get("stored") or {}).get("to", "")),
        claim=claim and Claim(claim["owner"], int(claim["first"]), int(claim["last"]), _seconds(claim["until"])),
        handled=handled and Handled(handled["owner"], int(handled["last"]), _place(handled)),
        state=document["state"],
        head=_place(document.get("halted")) or None,
        parked=frozenset(each["hash"] for each in document.get("parkedKeys") or ()),
    )


_VIEWS: Mapping[str, Callable[[Stored, Any], relation.Document]] = {
    "leases": _lease,
    "handlers": _handler,
    "partitions": _partition,
    "backlog": lambda document, _: StoredChange(int(document["term"]), str(document["_id"]).rpartition("/")[2]),
    "dead_letters": lambda document, _: Letter(_place(document), document.get("parked")),
}
