"""
The partitions as the listener and the operator see them.

A take-over raises every epoch to the new version in one bulk update, commits what is handled on the
spot, and leaves live claims alone with their fences: their executions may finish, because they prove
themselves by fence and owner. So neither a deploy nor a crash of the listener repeats handlers that
are running.

`committed` and `resumeToken` are always taken from one image of the document: a number from one
reading and a token from another could pass a change.

An operator's command compares `committed` and `fence` as seen, raises the fence and clears the claim.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bson.int64 import Int64
from pymongo.collection import Collection
from pymongo.errors import BulkWriteError

from mongo_celery.bridge.state.claims import CHARGE, COMMIT
from mongo_celery.mongo.expressions import literal, next_number
from mongo_celery.mongo.table import Table, call_timeout
from mongo_celery.mongo.verdicts import Code

_DEFAULTS: dict[str, Any] = {
    "epoch": Int64(0),
    "committed": Int64(0),
    "resumeToken": None,
    "fence": Int64(0),
    "claim": None,
    "handled": None,
    "retry": None,
    "single": None,
    "head": None,
    "state": "flowing",
}

_PROJECTION: dict[str, Any] = {
    **dict.fromkeys(_DEFAULTS, 1),
    "live": {"$gt": ["$claim.until", "$$NOW"]},
    "due": {"$subtract": ["$retry.notBefore", "$$NOW"]},
    "ahead": {"$subtract": [{"$subtract": ["$claim.until", "$$NOW"]}, "$claim.ttl"]},
}


@dataclass(frozen=True, slots=True)
class Image:
    """
    One majority read of a partition's document, with the server's verdicts on its times.

    Attributes:
        data: comparable part of the committed token; empty before the first commit.
        live: whether a claim stands and has not lapsed.
        due_in: seconds until a parked change may run; 0 or less when it may.
        ahead: seconds by which a claim's expiry exceeds its own ttl; positive only after a clock fault.
        waiting: since when (`since`), why (`cause`) and how often (`count`) the first change has waited for
            infrastructure; None after any other outcome.
    """

    subscription: str
    index: int
    epoch: int
    committed: int
    token: Mapping[str, Any] | None
    data: str
    fence: int
    state: str
    claim: Mapping[str, Any] | None
    live: bool
    ahead: float
    handled: Mapping[str, Any] | None
    due_in: float
    retries: int
    crashes: int
    error: str | None
    single: int
    head: Mapping[str, Any] | None
    waiting: Mapping[str, Any] | None = None

    @property
    def parked(self) -> bool:
        """Whether a change waits for its retry time."""
        return self.due_in > 0


class Partitions:
    """All partitions of one bridge."""

    def __init__(self, collection: Collection[dict[str, Any]], bridge: str, ttl: float) -> None:
        self._table = Table(collection, call_timeout(ttl))
        self._bridge = bridge

    def partition_id(self, subscription: str, generation: int, index: int) -> str:
        """`_id` of a partition's document."""
        return f"{self._bridge}/{subscription}/{generation}/{index}"

    def prepare(
        self,
        subscription: str,
        generation: int,
        count: int,
        version: int,
        token: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Create the partitions of a subscription that are missing, positioned at `token`.

        Their fences count from the lease's version, which is above all that was ever given. Their epoch is that
        version too: so it shows whose they are, and a later term knows what an older one has left.
        """
        prefix = self.partition_id(subscription, generation, 0)[:-1]
        with self._table.limit():
            present = {doc["_id"] for doc in self._table.find(_under(prefix), {"_id": 1})}
            missing = [
                {
                    "_id": f"{prefix}{index}",
                    **_DEFAULTS,
                    "epoch": Int64(version),
                    "fence": Int64(version),
                    "resumeToken": dict(token) if token else None,
                }
                for index in range(count)
                if f"{prefix}{index}" not in present
            ]
            if missing:
                self._insert(missing)

    def _insert(self, documents: Sequence[dict[str, Any]]) -> None:
        try:
            self._table.collection.insert_many(documents, ordered=False)
        except BulkWriteError as error:
            if any(failure["code"] != Code.DuplicateKey for failure in error.details["writeErrors"]):
                raise

    def discard(self, subscription: str, generation: int, version: int) -> None:
        """
        Remove partitions of a generation that never became valid, before they are prepared again.

        What a later term has prepared stays: there the generation may be in force, and at work.
        """
        prefix = self.partition_id(subscription, generation, 0)[:-1]
        self._table.delete_all({**_under(prefix), "epoch": {"$lte": version}})

    def take_over(self, subscription: str, generation: int, version: int) -> list[Image]:
        """
        Close the partitions of a subscription to all older terms, and commit what is handled.

        Returns:
            Their images afterwards. One whose epoch is larger than `version` was not won.
        """
        handled = {"$gt": ["$handled", None]}
        change: dict[str, Any] = {"epoch": Int64(version)}
        for name, value in COMMIT.items():
            change[name] = {"$cond": [handled, value, f"${name}"]}
        scope = _under(f"{self._bridge}/{subscription}/{generation}/")
        self._table.update_all({**scope, "epoch": {"$lt": version}}, [{"$set": change}])
        return self._images(scope)

    def look(self, ids: Iterable[str]) -> list[Image]:
        """Some partitions, by `_id`."""
        return self._images({"_id": {"$in": list(ids)}})

    def of(self, subscriptions: Iterable[str], generation: int) -> list[Image]:
        """All partitions of some subscriptions in a generation."""
        return self._images(
            {"$or": [_under(f"{self._bridge}/{name}/{generation}/") for name in subscriptions]},
        )

    def clear_impossible_claim(self, partition_id: str, fence: int, until: Any) -> bool:
        """
        End a claim as it was seen: one whose expiry only a wrong clock can have written, or one that has lapsed.

        It is charged like any claim that lapsed.
        """
        retry = {"$mergeObjects": ["$retry", CHARGE]}
        change = {
            "fence": next_number("fence"),
            "claim": None,
            "retry": retry,
            "single": {"$max": ["$single", "$claim.last"]},
        }
        guard = {"_id": partition_id, "fence": fence, "claim.until": until, "handled": None}
        return self._table.update(guard, [{"$set": change}])

    def close_others(self, generation: int, version: int) -> None:
        """
        Shut every generation but this one, of all subscriptions: no version can claim there any more.

        Also those of subscriptions that have no handler now, and what a crash has left open.
        """
        others = {"$not": {"$regex": f"/{generation}/[0-9]+$"}}
        scope = _under(f"{self._bridge}/")["_id"]
        self._table.update_all(
            {"_id": {**scope, **others}, "epoch": {"$lte": version}, "state": {"$ne": "closed"}},
            {"$set": {"epoch": Int64(version), "state": "closed"}},
        )

    def largest_epoch(self) -> int:
        """The largest epoch of any partition of the bridge, in whatever generation; 0 where there is none."""
        found = self._table.find_one(_under(f"{self._bridge}/"), {"epoch": 1}, sort=[("epoch", -1)])
        return int(found["epoch"]) if found else 0

    def pause(self, image: Image, generation: int) -> bool:
        """Let no new claim begin; what runs may finish."""
        return self._command(image, generation, {"state": "paused"}, "flowing")

    def resume(self, image: Image, generation: int) -> bool:
        """Let a paused partition flow again."""
        return self._command(image, generation, {"state": "flowing"}, "paused")

    def retry(self, image: Image, generation: int) -> bool:
        """Run the first change of a halted or parked partition again at once, with its counts at zero."""
        change = {"state": "flowing", "retry": None, "head": None, "claim": None, "fence": next_number("fence")}
        return self._command(image, generation, change, image.state)

    def skip(self, image: Image, generation: int) -> bool:
        """Pass over the change at which a partition halted."""
        assert image.head is not None, "only a halted partition knows its head"
        change = {
            "state": "flowing",
            "committed": Int64(image.committed + 1),
            "resumeToken": literal(dict(image.head["resumeToken"])),
            "retry": None,
            "head": None,
            "claim": None,
            "fence": next_number("fence"),
        }
        return self._command(image, generation, change, "halted")

    def _command(self, image: Image, generation: int, change: Mapping[str, Any], state: str) -> bool:
        guard = {
            "_id": self.partition_id(image.subscription, generation, image.index),
            "committed": image.committed,
            "fence": image.fence,
            "state": state,
            "handled": None,
        }
        if "fence" not in change:  # pausing leaves a running execution alone, whatever its fence
            del guard["fence"], guard["committed"], guard["handled"]
        return self._table.update(guard, [{"$set": dict(change)}])

    def _images(self, query: Mapping[str, Any]) -> list[Image]:
        return [image_of(document) for document in self._table.find(query, _PROJECTION)]


def image_of(document: Mapping[str, Any]) -> Image:
    """An image from a document that was read with the verdicts."""
    _, subscription, _, index = document["_id"].split("/")
    token, retry = document["resumeToken"], document["retry"] or {}
    return Image(
        subscription=subscription,
        index=int(index),
        epoch=document["epoch"],
        committed=document["committed"],
        token=token,
        data=token["_data"] if token else "",
        fence=document["fence"],
        state=document["state"],
        claim=document["claim"],
        live=bool(document["live"]) and document["claim"] is not None,
        ahead=(document["ahead"] or 0) / 1000,
        handled=document["handled"],
        due_in=(document["due"] or 0) / 1000,
        retries=retry.get("count", 0),
        crashes=retry.get("crashes", 0),
        error=retry.get("error"),
        single=document["single"] or 0,
        head=document["head"],
        waiting=retry.get("waiting"),
    )


def _under(prefix: str) -> dict[str, Any]:
    return {"_id": {"$gte": prefix, "$lt": prefix[:-1] + chr(ord(prefix[-1]) + 1)}}
