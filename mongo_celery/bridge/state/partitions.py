"""
The partitions as the listener and the operator see them.

A take-over raises every `term` to the new one in one bulk update, commits what is handled on the
spot, and leaves live claims alone with their fencing tokens: their executions may finish, because they prove
themselves by fencing token and owner. So neither a deploy nor a crash of the listener repeats handlers that
are running. A partition that an open transaction has written (a client that died before it could commit) keeps
the term that it has: messages of the older term may still claim there, as before, and nobody else's can. It is
won when it is free.

`committed` and `resumeToken` are always taken from one image of the document: a number from one
reading and a token from another could pass a change.

An operator's command compares `committed` and `fencingToken` as seen, raises the token and clears the claim.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

import bson
from bson.int64 import Int64
from bson.raw_bson import RawBSONDocument
from pymongo import InsertOne
from pymongo.client_session import ClientSession
from pymongo.collection import Collection

from mongo_celery.bridge.existing import extract_term
from mongo_celery.bridge.state.claims import COMMIT, collect_parked_hashes, position_fields
from mongo_celery.bridge.state.dead_letters import PARKED_BEHIND, REPLAYS_MAX, store
from mongo_celery.bridge.state.state_collection import StateCollection, ids_under, to_unsigned
from mongo_celery.bridge.state.subscriptions import Layout
from mongo_celery.mongo.expressions import REMOVED, literal, next_number, remaining
from mongo_celery.mongo.locked import update_around_locks, update_one_around_lock, update_unlocked
from mongo_celery.mongo.table import JOURNALED, Table, call_timeout

_COMPARED = 64  # with how many that were seen a partition is compared; with all, the cost would grow with their square
_FLOWING_SHARE = 2  # one in so many has to flow
_WINNING_SECONDS = 0.25  # the leading thread has other things to do
_TRACES = ("resumeToken", "claim", "handled", "retry", "single", "halted")
"""Fields that a partition at which nobody has ever worked has not."""

_PROJECTION: dict[str, Any] = {
    **dict.fromkeys(
        ("handler", "partition", "term", "committed", "fencingToken", "state", "spilled", "lastRun", *_TRACES), 1
    ),
    "live": {"$gt": ["$claim.until", "$$NOW"]},
    "due": remaining("retry.notBefore"),
    "readAt": "$$NOW",
    "parkedCount": {"$cond": [{"$isArray": "$parkedKeys"}, {"$size": "$parkedKeys"}, 0]},
}

_SWEPT: dict[str, Any] = {
    **_PROJECTION,
    "readAt": {"$cond": [{"$gt": ["$lastRun.at", {"$subtract": ["$$NOW", 10_000]}]}, "$$NOW", REMOVED]},
}
"""The same, byte for byte, for as long as nothing happens in a partition: the time is of use only after a run."""


_UNTRIED = {
    **dict.fromkeys(("claim", "retry", "halted"), REMOVED),
    "fencingToken": next_number("fencingToken"),
}
"""Changes of a command that end the present run and forget its attempts; an execution that still runs is refused."""

_COUNTED: Mapping[str, Any] = {"claim": None, "retry.count": 0, "retry.crashes": 0}
"""Fields that say, above these values, that a partition's first change was tried."""


@dataclass(frozen=True, slots=True)
class Image:
    """
    One majority read of a partition's document, with the server's verdicts on its times.

    Attributes:
        data: comparable part of the committed token. Empty before the first commit.
        live: whether a claim stands and has not lapsed.
        due_in: seconds until a parked change may run; 0 or less when it may.
        spilled: `to`, `since`, `reason`: up to where changes of this partition are stored, and not all committed. None
            where none are.
        retry: what is counted of the first change, as it is stored. None where it is of another one.
        waiting: since when (`since`), why (`cause`) and how often (`count`) the first change has waited for
            infrastructure. None after any other outcome.
        ran: of the last run that was committed, its `last` change, when it was `claimed` and committed (`at`), and the
            milliseconds that its handler `took`. None before the first.
        read_at: when it was read, by the server's clock.
        head: of a halted partition, `at` which time and change that was: `key` and `resumeToken`. None for all others.
        parked_keys: how many keys are parked: changes of theirs are set aside until a person releases them.
    """

    subscription: str
    index: int
    term: int
    committed: int
    token: Mapping[str, Any] | None
    data: str
    fencing_token: int
    state: str
    claim: Mapping[str, Any] | None
    live: bool
    handled: Mapping[str, Any] | None
    due_in: float
    retries: int
    crashes: int
    error: str | None
    single: int
    head: Mapping[str, Any] | None
    waiting: Mapping[str, Any] | None = None
    spilled: Mapping[str, Any] | None = None
    retry: Mapping[str, Any] | None = None
    ran: Mapping[str, Any] | None = None
    read_at: datetime | None = field(default=None, compare=False)
    parked_keys: int = 0

    @property
    def parked(self) -> bool:
        """Return True if a change waits for its retry time."""
        return self.due_in > 0


class Seen(NamedTuple):
    """
    Last observed state of a partition with a run in flight. If it is unchanged, a poll can skip the partition.

    Attributes:
        fencing_token: raised by every claim, and by every command that moves a position.
        claimed: whether a claim stood, and nothing was handled. Else nobody had claimed what is out.
    """

    fencing_token: int
    claimed: bool


class Partitions(StateCollection):
    """All partitions of one bridge."""

    def __init__(self, collection: Collection[dict[str, Any]], bridge: str, ttl: float) -> None:
        super().__init__(collection, bridge, ttl)
        self._types = types = collection.codec_options
        raw: Any = collection.with_options(types.with_options(document_class=RawBSONDocument))
        self._raw = Table(raw, call_timeout(ttl))

    def partition_id(self, subscription: str, generation: int, index: int) -> str:
        """`_id` of a partition's document."""
        return f"{self._bridge}/{subscription}/{generation}/{index}"

    def prepare(
        self,
        positions: Mapping[str, Mapping[str, Any] | None],
        layouts: Mapping[str, Layout],
        term: int,
        *,
        fencing_token: int = 0,
    ) -> None:
        """
        Create the partitions of some subscriptions that are missing in their layouts, positioned at each one's token.

        Their fencing tokens count from the lease's term, which is above all that earlier terms have given. Their own
        term is the same: so it shows whose they are, and a later term knows what an older one has left. The number
        of calls does not depend on that of subscriptions.

        Args:
            fencing_token: the largest of the partitions that this term has removed.
        """
        if not positions:
            return
        generations = {name: layouts[name].term for name in positions}
        present = {doc["_id"] for doc in self._table.find(self._scope(generations), {"_id": 1})}
        wanted = {
            self.partition_id(name, generations[name], index): (name, index, token)
            for name, token in positions.items()
            for index in range(layouts[name].partitions)
        }
        self._table.write_all(
            [
                InsertOne(
                    {
                        "_id": partition_id,
                        "bridge": self._bridge,
                        "handler": name,
                        "partitioningTerm": Int64(generations[name]),
                        "partition": index,
                        "state": "flowing",
                        "term": Int64(term),
                        "fencingToken": Int64(max(term, fencing_token)),
                        "committed": Int64(0),
                        **(position_fields(token) if token else {}),
                    }
                )
                for partition_id, (name, index, token) in wanted.items()
                if partition_id not in present
            ]
        )

    def take_over(self, generations: Mapping[str, int], term: int) -> list[Image]:
        """
        Close the partitions of some subscriptions to all older terms, and commit what is handled.

        The number of calls does not depend on that of partitions, unless some are locked by open transactions.

        Args:
            generations: by subscription, that of its layout in force.

        Returns:
            Their images afterwards. One whose term is larger than `term` was not won, one whose term is smaller
            is locked. See `win`.
        """
        if not generations:
            return []
        scope = self._scope(generations)
        update_around_locks(self._table, scope, _older(term), _winning(term))
        return self._images(scope)

    def win(self, ids: Iterable[str], term: int) -> list[Image]:
        """
        Take over partitions that were locked, as far as they are free now. Bounded, and waits for none of them.

        Returns:
            Their images afterwards, as of `take_over`.
        """
        locked = list(ids)
        update_unlocked(self._table, locked, _older(term), _winning(term), seconds=_WINNING_SECONDS)
        return self.look(locked)

    def look(self, ids: Iterable[str], session: ClientSession | None = None) -> list[Image]:
        """Some partitions, by `_id`. In a causally consistent session, what is read later is no older."""
        return self._images({"_id": {"$in": list(ids)}}, session)

    def list_changed(self, seen: Mapping[str, Seen | None], session: ClientSession | None = None) -> list[Image]:
        """
        Return some partitions, by `_id`, without those that are as they were seen. None matches no earlier state.

        A heartbeat, a lapse and a pause are no changes here.
        """
        pairs = list(seen.items())
        parts = [_unlike(dict(pairs[at : at + _COMPARED])) for at in range(0, len(pairs), _COMPARED)]
        return self._images(parts[0] if len(parts) == 1 else {"$or": parts}, session) if parts else []

    def flush(self) -> None:
        """
        See to it that the primary's journal has what was written up to now, by a write that finds nothing.

        On a set of one member majority reads show a write with w:1 only then. Others replicate it by themselves.
        """
        self._table.update_unretried({"_id": ""}, {"$set": {"term": Int64(0)}}, JOURNALED)

    def of(self, generations: Mapping[str, int], session: ClientSession | None = None) -> list[Image]:
        """All partitions of some subscriptions, by name in these generations."""
        return self._images(self._scope(generations), session) if generations else []

    def sweep(
        self, generations: Mapping[str, int], session: ClientSession, known: Mapping[bytes, Image]
    ) -> dict[bytes, Image]:
        """
        Read as `of`, again and again: most partitions are as they were, and have the image that they had.

        Args:
            known: what this has returned before.

        Returns:
            The images by the bytes of their documents.
        """
        found: dict[bytes, Image] = {}
        documents: list[Any] = self._raw.find(self._scope(generations), _SWEPT, session) if generations else []
        for document in documents:
            raw = bytes(document.raw)
            image = known.get(raw)
            found[raw] = build_image(bson.decode(raw, self._types)) if image is None else image
        return found

    def are_touched(self, subscription: str) -> bool:
        """Return True if anything was ever claimed, decided or stored in a handler's partitions, old ones included."""
        marks: list[dict[str, Any]] = [{name: {"$ne": None}} for name in _TRACES]
        traces = [{"committed": {"$gt": 0}}, {"state": {"$ne": "flowing"}}, *marks]
        found = self._table.find_one({"_id": ids_under(f"{self._bridge}/{subscription}"), "$or": traces}, {"_id": 1})
        return found is not None

    def mark_spilled(
        self, partition_id: str, term: int, to: str, reason: str, session: ClientSession | None = None
    ) -> bool:
        """
        Record that changes are stored up to a place. It only grows. Repeating it is harmless.

        Args:
            to: comparable part of the last stored change's token.
            reason: why they are stored, for people. Kept from the first mark until it is cleared.

        Returns:
            False when the term is over.

        Raises:
            PyMongoError: also where an open transaction has locked the partition.
        """
        since = {"since": "$$NOW", "reason": literal(reason)}
        farthest = {"$max": ["$spilled.to", literal(to)]}  # an answer that was lost may be of a write that comes late
        change = {"spilled": {"$mergeObjects": [since, "$spilled", {"to": farthest}]}}
        return update_one_around_lock(self._table, {"_id": partition_id, "term": term}, [{"$set": change}], session)

    def clear_spilled(self, ids: Iterable[str], term: int) -> None:
        """
        Record where all that is marked as stored is committed, by the server's comparison. Bounded.

        It waits for no partition that is locked: the images say where it is recorded.
        """
        done = {"$gte": ["$resumeToken._data", "$spilled.to"]}
        condition = {"term": term, "spilled": {"$ne": None}, "$expr": done}
        change = {"$unset": {"spilled": ""}}
        update_unlocked(self._table, list(ids), condition, change, seconds=_WINNING_SECONDS)

    def retire(self, name: str, layout: Layout, token: Mapping[str, Any] | None, term: int) -> int | None:
        """
        Remove the partitions of a handler if they have nothing left to do, all or none of them.

        All that they have done lies at or before the watermark, so a take-over can make them anew there. Partitions
        that an older term has left go, too.

        Args:
            token: of the watermark. None where nothing was ever stored.

        Returns:
            The largest fencing token that they have given; 0 where they are gone already. None where one has anything
            left to do, is blocked, has gone beyond the watermark, or is another term's.
        """
        mine = self._scope({name: layout.term})
        drained = {**mine, "term": term, **_match_drained(token["_data"] if token else "")}
        left = {"_id": ids_under(f"{self._bridge}/{name}"), "term": {"$lte": term}}
        collection = self._table.collection

        def remove(session: ClientSession) -> int | None:
            fences = [int(each["fencingToken"]) for each in collection.find(mine, {"fencingToken": 1}, session=session)]
            if fences and collection.count_documents(drained, session=session) != layout.partitions:
                session.abort_transaction()
                return None
            collection.delete_many(left, session=session)
            return max(fences, default=0)

        with self._table.session() as session:
            return session.with_transaction(remove)

    def collect_parked_hashes(
        self, subscription: str, generation: int, session: ClientSession | None = None
    ) -> frozenset[int]:
        """Return the hashes of the keys that are parked in a partitioning, from 0 to 2^64 - 1."""
        scope = {**self._scope({subscription: generation}), "parkedKeys": {"$ne": None}}
        found = self._table.find(scope, {"parkedKeys.hash": 1}, session=session)
        return frozenset().union(*map(collect_parked_hashes, found))

    def largest_term(self) -> int:
        """The largest term of any partition of the bridge, in whatever partitioning; 0 where there is none."""
        found = self._table.find_one({"_id": ids_under(self._bridge)}, {"term": 1}, sort=[("term", -1)])
        return int(found["term"]) if found else 0

    def pause(self, image: Image, generation: int) -> bool:
        """Let no new claim begin. What runs may finish."""
        return self._command(image, generation, {"state": "paused"}, "flowing")

    def resume(self, image: Image, generation: int) -> bool:
        """Let a paused partition flow again."""
        return self._command(image, generation, {"state": "flowing"}, "paused")

    def retry(self, image: Image, generation: int) -> bool:
        """Run the first change of a halted or parked partition again at once, with its counts at zero."""
        passed_over = (image.retry or {}).get("passedOver")  # the names of those for which it stands stay with it
        retry = REMOVED if passed_over is None else literal({"passedOver": passed_over})
        change = {**_UNTRIED, "state": "flowing", "retry": retry}
        return self._command(image, generation, change, image.state)

    def forget_attempts(self, subscription: str, generation: int) -> None:
        """Forget what is counted of changes that are given up, in all partitions of a handler."""
        with self._table.limit():
            self._table.collection.update_many(*build_attempt_reset(f"{self._bridge}/{subscription}/{generation}"))

    def mark_head(self, image: Image, generation: int) -> bool:
        """
        Let the mark reach the change at which a partition has halted. It must be stored.

        No term guards it, as none guards what an operator does: a mark promises nothing of what lies between, and what
        it reaches is not committed while the guard holds.
        """
        assert image.head is not None, "only a halted partition knows its head"
        guard = self._guard(image, generation, "halted")
        to = {"$max": ["$spilled.to", literal(image.head["resumeToken"]["_data"])]}
        since = {"since": "$$NOW", "reason": "halted"}
        return self._table.update(guard, [{"$set": {"spilled": {"$mergeObjects": [since, "$spilled", {"to": to}]}}}])

    def discard(self, image: Image, generation: int) -> bool:
        """Pass over the change at which a partition halted. Nothing of it is kept."""
        return self._command(image, generation, _build_skip(image), "halted")

    def set_aside(
        self, image: Image, generation: int, dead_letter: Mapping[str, Any], letters: Collection[dict[str, Any]]
    ) -> bool:
        """
        Pass over the change at which a partition halted and store its dead letter, both or neither.

        The fencing tokens behind the one that was seen are left to its replays. A change of a parked key waits behind
        the others of that.

        Args:
            letters: where it is stored.
        """
        guard, change = self._guard(image, generation, "halted"), _build_skip(image)
        change["fencingToken"] = {"$max": [Int64(image.fencing_token + REPLAYS_MAX), next_number("fencingToken")]}

        def both(session: ClientSession) -> bool:
            keys = {"parkedKeys.hash": 1}
            passed = self._table.collection.find_one_and_update(guard, [{"$set": change}], keys, session=session)
            if passed is None:
                session.abort_transaction()
                return False
            waits = {"parked": dead_letter["hash"], "cause": PARKED_BEHIND}
            is_parked = to_unsigned(dead_letter["hash"]) in collect_parked_hashes(passed)
            store(letters, {**dead_letter, **waits} if is_parked else dead_letter, session)
            return True

        with self._table.session() as session:
            return session.with_transaction(both)

    def _guard(self, image: Image, generation: int, state: str) -> dict[str, Any]:
        return {
            "_id": self.partition_id(image.subscription, generation, image.index),
            "committed": image.committed,
            "fencingToken": image.fencing_token,
            "state": state,
            "handled": None,
        }

    def _command(self, image: Image, generation: int, change: Mapping[str, Any], state: str) -> bool:
        guard = self._guard(image, generation, state)
        if "fencingToken" not in change:  # pausing leaves a running execution alone, whatever its token
            del guard["fencingToken"], guard["committed"], guard["handled"]
        return self._table.update(guard, [{"$set": dict(change)}])

    def _scope(self, generations: Mapping[str, int]) -> dict[str, Any]:
        return {
            "$or": [{"_id": ids_under(f"{self._bridge}/{name}/{number}")} for name, number in generations.items()],
        }

    def _images(self, query: Mapping[str, Any], session: ClientSession | None = None) -> list[Image]:
        return [build_image(document) for document in self._table.find(query, _PROJECTION, session=session)]


def build_attempt_reset(prefix: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """
    Return guard and update that forget attempts at changes that are given up, so that the next ones are not charged.

    A partition keeps its counts while its first change is stored, runs, or is halted.

    Args:
        prefix: of the partitions' ids.
    """
    is_free = {"$lte": [{"$ifNull": ["$claim.until", "$$NOW"]}, "$$NOW"]}
    is_given_up = {"$lte": [{"$ifNull": ["$spilled.to", ""]}, {"$ifNull": ["$resumeToken._data", ""]}]}
    is_counted = {"$or": [{"$gt": [f"${name}", least]} for name, least in _COUNTED.items()]}
    guard = {
        "_id": ids_under(prefix),
        "state": "flowing",
        "handled": None,
        "$expr": {"$and": [is_free, is_given_up, is_counted]},
    }
    kept = {"$cond": [{"$gt": ["$retry.passedOver", None]}, {"passedOver": "$retry.passedOver"}, REMOVED]}
    return guard, [{"$set": {**_UNTRIED, "retry": kept}}]


def visible_state(image: Image) -> str:
    """Return the state of a partition as people see it: a flowing one may wait for MongoDB, the broker or its retry."""
    if image.state != "flowing":
        return image.state
    if image.waiting is not None and not image.live and image.handled is None:
        return "waiting"
    return "retrying" if image.parked else "flowing"


def is_mostly_blocked(images: Sequence[Image]) -> bool:
    """Return True if so few of a handler's partitions flow that a wait for all of them would be long."""
    return sum(visible_state(image) == "flowing" for image in images) * _FLOWING_SHARE < len(images)


def build_image(document: Mapping[str, Any]) -> Image:
    """An image from a document that was read with the verdicts."""
    token, retry = document.get("resumeToken"), _current_retry(document) if "retry" in document else None
    is_gone = retry is None and "retry" in document
    retries = retry or {}
    return Image(
        subscription=document["handler"],
        index=document["partition"],
        term=document["term"],
        committed=document["committed"],
        token=token,
        data=token["_data"] if token else "",
        fencing_token=document["fencingToken"],
        state=document["state"],
        claim=document.get("claim"),
        live=bool(document["live"]),
        handled=document.get("handled"),
        due_in=0.0 if is_gone else (document["due"] or 0) / 1000,
        retries=retries.get("count", 0),
        crashes=retries.get("crashes", 0),
        error=retries.get("error"),
        single=0 if is_gone else document.get("single", 0),
        head=document.get("halted"),
        waiting=retries.get("waiting"),
        spilled=document.get("spilled"),
        retry=retry,
        ran=document.get("lastRun"),
        read_at=document.get("readAt"),
        parked_keys=document.get("parkedCount") or 0,
    )


def _current_retry(document: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """
    Return the counts of the first change, if that is still the same.

    An existing document that an older term has read comes again as another one, unless it is stored. One at which the
    partition has halted is there as its head.
    """
    retry: Mapping[str, Any] | None = document.get("retry")
    data = (retry or {}).get("of")
    term = extract_term(data) if isinstance(data, str) else None
    if term is None or term >= document["term"] or "halted" in document:
        return retry
    marked = (document.get("spilled") or {}).get("to", "")
    return retry if marked >= data else None


def _build_skip(image: Image) -> dict[str, Any]:
    """Return the fields that skip the change at which a partition is halted."""
    assert image.head is not None, "only a halted partition knows its head"
    return {
        "state": "flowing",
        "committed": Int64(image.committed + 1),
        **{name: literal(value) for name, value in position_fields(image.head["resumeToken"]).items()},
        **_UNTRIED,
    }


def _match_drained(data: str) -> dict[str, Any]:
    """Match partitions that flow, with nothing under way, stored, parked, or done after a place."""
    own = {"$ifNull": ["$resumeToken._data", ""]}
    conditions = [
        {"$lte": ["$claim.until", "$$NOW"]},  # also where there is no claim
        {"$lte": [own, literal(data)]},
        {"$lte": [{"$ifNull": ["$spilled.to", ""]}, own]},
    ]
    unparked: dict[str, Any] = {"$in": [None, []]}
    return {"state": "flowing", "handled": None, "parkedKeys": unparked, "$expr": {"$and": conditions}}


def _unlike(seen: Mapping[str, Seen | None]) -> dict[str, Any]:
    """Matches some partitions, but for those that are as they were seen."""
    alike: dict[Seen, list[str]] = {}
    for partition_id, each in seen.items():
        if each is not None:
            alike.setdefault(each, []).append(partition_id)
    query: dict[str, Any] = {"_id": {"$in": list(seen)}}
    return {**query, "$nor": [_as_seen(each, ids) for each, ids in alike.items()]} if alike else query


def _as_seen(seen: Seen, ids: list[str]) -> dict[str, Any]:
    same: dict[str, Any] = {"fencingToken": seen.fencing_token, "_id": {"$in": ids}}
    return {**same, "claim": {"$ne": None}, "handled": None} if seen.claimed else same


def _older(term: int) -> dict[str, Any]:
    return {"term": {"$lt": Int64(term)}}


def _winning(term: int) -> list[dict[str, Any]]:
    """The update of a take-over: my term, and the commit of what is handled."""
    handled = {"$gt": ["$handled", None]}
    change: dict[str, Any] = {"term": Int64(term)}
    for name, value in COMMIT.items():
        change[name] = {"$cond": [handled, value, f"${name}"]}
    return [{"$set": change}]


def build_move(term: int, token: Mapping[str, Any], *, forward: bool, only: str | None = None) -> list[dict[str, Any]]:
    """
    The update by which a person sends partitions to a place: a take-over, and then, behind the place, the way back.

    What stood there is over, and whoever runs is refused. A pause is kept. A mark that was reached goes: what it stood
    for may be removed, and nobody stores it again.

    On the way back this is over, too, where nothing was ever committed: a change that is halted, running or retrying
    there is read again, and is judged by the present code.

    Args:
        term: of the move.
        token: of the place.
        forward: whether those are moved that stand before the place, not behind it.
        only: `_id` of the only one that is moved. None for all.
    """
    own, data = {"$ifNull": ["$resumeToken._data", ""]}, literal(token["_data"])
    moves: dict[str, Any] = {"$lt" if forward else "$gt": [own, data]}
    if only is not None:
        moves = {"$and": [{"$eq": ["$_id", literal(only)]}, moves]}
    reached = {"$lte": ["$spilled.to", data if forward else own]}  # also where there is no mark
    ends = moves if forward else {"$or": [moves, {"$eq": [own, ""]}]}
    is_again = not forward and only is None  # all that these have handled behind the place is handled again
    place = {
        **({"rewound": {"$cond": [moves, Int64(term), "$rewound"]}} if is_again else {}),
        **{name: {"$cond": [moves, literal(value), f"${name}"]} for name, value in position_fields(token).items()},
        "spilled": {"$cond": [{"$and": [moves, reached]}, REMOVED, "$spilled"]},
    }
    over = {**_UNTRIED, "state": {"$cond": [{"$eq": ["$state", "paused"]}, "paused", "flowing"]}}
    over = {name: {"$cond": [ends, value, f"${name}"]} for name, value in over.items()}
    return [*_winning(term), {"$set": {**place, **over}}]
