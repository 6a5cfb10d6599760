"""
The partitions as the listener and the operator see them.

A take-over raises every epoch to the new version in one bulk update, commits what is handled on the
spot, and leaves live claims alone with their fences: their executions may finish, because they prove
themselves by fence and owner. So neither a deploy nor a crash of the listener repeats handlers that
are running. A partition that an open transaction has written (a client that died before it could commit) keeps
the epoch that it has: messages of the older term may still claim there, as before, and nobody else's can. It is
won when it is free.

`committed` and `resumeToken` are always taken from one image of the document: a number from one
reading and a token from another could pass a change.

An operator's command compares `committed` and `fence` as seen, raises the fence and clears the claim.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bson.int64 import Int64
from pymongo import InsertOne
from pymongo.collection import Collection

from mongo_celery.bridge.state.claims import CHARGE, COMMIT
from mongo_celery.mongo.expressions import literal, next_number, remaining
from mongo_celery.mongo.locked import update_around_locks, update_unlocked
from mongo_celery.mongo.table import Table, call_timeout

_WINNING_SECONDS = 0.25  # the leading thread has other things to do
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

_TRACES = ("resumeToken", "claim", "handled", "retry", "single", "head")
"""Fields that are null in a partition at which nobody has ever worked."""

_PROJECTION: dict[str, Any] = {
    **dict.fromkeys(_DEFAULTS, 1),
    "live": {"$gt": ["$claim.until", "$$NOW"]},
    "due": remaining("retry.notBefore"),
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
        positions: Mapping[str, Mapping[str, Any] | None],
        generation: int,
        count: int,
        version: int,
    ) -> None:
        """
        Create the partitions of some subscriptions that are missing, positioned at each one's token.

        Their fences count from the lease's version, which is above all that was ever given. Their epoch is that
        version too: so it shows whose they are, and a later term knows what an older one has left. The number of
        calls does not depend on that of subscriptions.
        """
        if not positions:
            return
        present = {doc["_id"] for doc in self._table.find(self._scope(positions, generation), {"_id": 1})}
        wanted = {
            self.partition_id(name, generation, index): token
            for name, token in positions.items()
            for index in range(count)
        }
        self._table.write_all(
            [
                InsertOne(
                    {
                        "_id": partition_id,
                        **_DEFAULTS,
                        "epoch": Int64(version),
                        "fence": Int64(version),
                        "resumeToken": dict(token) if token else None,
                    }
                )
                for partition_id, token in wanted.items()
                if partition_id not in present
            ]
        )

    def discard(self, subscriptions: Iterable[str], generation: int, version: int) -> None:
        """
        Remove partitions of a generation that never became valid, before they are prepared again.

        What a later term has prepared stays: there the generation may be in force, and at work.
        """
        self._table.delete_all({**self._scope(subscriptions, generation), "epoch": {"$lte": version}})

    def take_over(self, subscriptions: Iterable[str], generation: int, version: int) -> list[Image]:
        """
        Close the partitions of some subscriptions to all older terms, and commit what is handled.

        The number of calls does not depend on that of partitions, unless some are locked by open transactions.

        Returns:
            Their images afterwards. One whose epoch is larger than `version` was not won, one whose epoch is smaller
            is locked; see `win`.
        """
        names = list(subscriptions)
        if not names:
            return []
        scope = self._scope(names, generation)
        update_around_locks(self._table, scope, _older(version), _winning(version))
        return self._images(scope)

    def win(self, ids: Iterable[str], version: int) -> list[Image]:
        """
        Take over partitions that were locked, as far as they are free now; bounded, and waits for none of them.

        Returns:
            Their images afterwards, as of `take_over`.
        """
        locked = list(ids)
        update_unlocked(self._table, locked, _older(version), _winning(version), seconds=_WINNING_SECONDS)
        return self.look(locked)

    def look(self, ids: Iterable[str]) -> list[Image]:
        """Some partitions, by `_id`."""
        return self._images({"_id": {"$in": list(ids)}})

    def of(self, subscriptions: Iterable[str], generation: int) -> list[Image]:
        """All partitions of some subscriptions in a generation."""
        return self._images(self._scope(subscriptions, generation))

    def are_touched(self, subscription: str) -> bool:
        """Whether anything has ever been claimed, decided or stored in a subscription's partitions, of any layout."""
        marks: list[dict[str, Any]] = [{name: {"$ne": None}} for name in _TRACES]
        traces = [{"committed": {"$gt": 0}}, {"state": {"$nin": ["flowing", "closed"]}}, *marks]
        found = self._table.find_one({**_under(f"{self._bridge}/{subscription}/"), "$or": traces}, {"_id": 1})
        return found is not None

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

        Also those of subscriptions that have no handler now, and what a crash has left open. What an open transaction
        has locked there is left to the next take-over: in a generation that is over nothing is dispatched.
        """
        others = {"$not": {"$regex": f"/{generation}/[0-9]+$"}}
        scope = {"_id": {**_under(f"{self._bridge}/")["_id"], **others}}
        still_open = {"epoch": {"$lte": version}, "state": {"$ne": "closed"}}
        change = {"$set": {"epoch": Int64(version), "state": "closed"}}
        update_around_locks(self._table, scope, still_open, change)

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

    def _scope(self, subscriptions: Iterable[str], generation: int) -> dict[str, Any]:
        return {"$or": [_under(f"{self._bridge}/{name}/{generation}/") for name in subscriptions]}

    def _images(self, query: Mapping[str, Any]) -> list[Image]:
        return [image_of(document) for document in self._table.find(query, _PROJECTION)]


def state_of(image: Image) -> str:
    """The state of a partition as people see it: a flowing one may wait for infrastructure, or for its retry."""
    if image.state != "flowing":
        return image.state
    if image.waiting is not None and not image.live and image.handled is None:
        return "waiting"
    return "parked" if image.parked else "flowing"


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


def _older(version: int) -> dict[str, Any]:
    return {"epoch": {"$lt": Int64(version)}}


def _winning(version: int) -> list[dict[str, Any]]:
    """The update of a take-over: my epoch, and the commit of what is handled."""
    handled = {"$gt": ["$handled", None]}
    change: dict[str, Any] = {"epoch": Int64(version)}
    for name, value in COMMIT.items():
        change[name] = {"$cond": [handled, value, f"${name}"]}
    return [{"$set": change}]


def _under(prefix: str) -> dict[str, Any]:
    return {"_id": {"$gte": prefix, "$lt": prefix[:-1] + chr(ord(prefix[-1]) + 1)}}
