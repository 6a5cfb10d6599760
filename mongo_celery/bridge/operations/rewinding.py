"""
Sending a handler back to a place in the stream, or forward to now.

What would be done is read first, for the person who decides; then it is done in one transaction, if nobody leads and
nobody has led since. See `state/positions.py` for what makes it safe.

Backwards: everything behind the place is read and handled again, in order. Fenced targets take it, under fences that
are newer than all before: a target goes through its older states once more, up to the present one, and what was
running before cannot write over it. Forward: what lies between is passed over, and noted as a gap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import pymongo
from bson import Timestamp
from pymongo.errors import PyMongoError

from mongo_celery.arguments import nearest
from mongo_celery.bridge.existing import SNAPSHOT
from mongo_celery.bridge.operations.acts import audited, reached
from mongo_celery.bridge.operations.keys import key_of, partition_of_key, shown
from mongo_celery.bridge.operations.places import NOW, Asked, Reach, StreamPlace, place_of
from mongo_celery.bridge.operations.times import iso
from mongo_celery.bridge.state.dead_letters import ASKED, build_later_query
from mongo_celery.bridge.state.partitions import Image, visible_state
from mongo_celery.bridge.state.positions import Move, Moved
from mongo_celery.bridge.state.store import Store
from mongo_celery.bridge.state.subscriptions import (
    Layout,
    layouts_in_force,
    parse_lost_history,
    parse_name,
    parse_position,
)
from mongo_celery.errors import CommandRefusedError
from mongo_celery.mongo.locked import is_lock
from mongo_celery.mongo.oplog import time_of_token

if TYPE_CHECKING:
    from mongo_celery.bridge.wiring import Wiring
    from mongo_celery.command_line import CommandLine

_READ_SECONDS = 10.0
LOCKED = (
    "A partition is locked by an open transaction, most often of a worker that died: nothing is changed; repeat the "
    "command when the server has ended it, which takes a minute at most."
)


@dataclass(frozen=True, slots=True)
class PartitionMove:
    """
    One partition that is sent to the place.

    Attributes:
        standing: its state, as `status` says it.
        at: time of the last change that it has handled; None where there is none.
        key: of the change at which it has halted.
        running: whether a handler runs there at this moment.
        stored: how many of its changes are stored and not handled, at most; 0 where they stay.
    """

    index: int
    standing: str
    at: str | None
    key: str | None
    running: bool
    stored: int = 0


@dataclass(frozen=True, slots=True)
class RewindPlan:
    """
    What would be done, as it was seen.

    Attributes:
        to: the place.
        at: where the subscription stands, as a time.
        passed_from: the time of the first change that a way forward passes over; None for one back.
        documents: how many of these dead letters are of existing documents, which do not run again.
        snapshots: how many snapshots have given existing documents behind the place, which do not run again.
        partitions: those that would be sent there, or in which something ends.
        reread: indexes of the others that are read again from there. They handle what they have not handled.
        staying: how many are left as they are.
        dead_letters: how many of its dead letters are of changes behind the place; they stay.
        replays: how many replays of these that were asked for would be withdrawn.
        key: whose partition it is, for people; None for all. `typed_key` is how it was typed.
        leader: who leads, which keeps it from being done; None where nobody does.
    """

    subscription: str
    to: StreamPlace
    at: str | None
    forward: bool
    partitions: Sequence[PartitionMove]
    staying: int
    key: str | None
    leader: str | None
    move: Move
    dead_letters: int = 0
    replays: int = 0
    documents: int = 0
    snapshots: int = 0
    passed_from: Timestamp | None = None
    typed_key: str | None = None
    reread: Sequence[int] = ()

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "subscription": self.subscription,
            "to": self.to.iso,
            "token": self.to.token["_data"],
            "from": self.at,
            "forward": self.forward,
            "passed_from": iso(self.passed_from),
            "documents": self.documents,
            "snapshots": self.snapshots,
            "partitions": [asdict(each) for each in self.partitions],
            "reread": list(self.reread),
            "staying": self.staying,
            "dead_letters": self.dead_letters,
            "replays": self.replays,
            "key": self.key,
            "leader": self.leader,
        }


def plan_rewind(
    wiring: Wiring, subscription: str, asked: Asked, *, key: str | None = None, source: str | None = None
) -> RewindPlan:
    """
    Look at what sending a subscription to a place would do. Changes nothing.

    Args:
        asked: the place.
        key: only the partition in which its changes lie; as it was typed.
        source: the collection of that key, where the handler has several.

    Raises:
        CommandRefusedError: there is no such subscription or place, or nothing to do.
        ServerUnavailableError, DeploymentError: as for the commands.
    """
    with reached(wiring) as store:
        documents = {parse_name(document): document for document in store.subscriptions.read_all()}
        lease = store.leases.read() or {}
        layout = _layout(wiring, documents, subscription)
        _refuse_lost(wiring.line, subscription, documents[subscription])
        chosen = meant = None
        if key is not None:
            meant = key_of(wiring, subscription, layout, key, source)
            chosen = partition_of_key(wiring, subscription, layout, meant, source)
        to = place_of(wiring, asked, Reach.of(wiring.client), "--to")
        forward = asked.word == NOW
        images = store.partitions.of({subscription: layout.generation})
        sent = [each for each in images if chosen in (None, each.index) and _moves(each, to, forward=forward)]
        is_watermark_moved = _moves_watermark(documents[subscription], to, forward=forward, only=chosen is not None)
        if not sent and not is_watermark_moved:
            raise CommandRefusedError(_nothing_to_do(subscription, documents[subscription], to, forward=forward))
        sent += [each for each in images if not forward and not _own(each) and _stands(each)]
        moved = [_partition_move(store, each, layout, to, forward=forward) for each in sent]
        others = sorted(each.index for each in images if each not in sent)
        reread = others if is_watermark_moved and not forward else []
        around = _around(wiring, store, images, layout, documents[subscription], to, moved, forward=forward)
        move = Move(
            subscription=subscription,
            token=to.token,
            time=to.time,
            forward=forward,
            generation=layout.generation,
            term=int(lease.get("term", 0)),
            partition=chosen,
            since=around.get("passed_from"),
        )
        return RewindPlan(
            subscription=subscription,
            to=to,
            at=iso(parse_position(documents[subscription])),
            forward=forward,
            partitions=sorted(moved, key=lambda each: each.index),
            reread=reread,
            staying=len(others) - len(reread),
            key=None if key is None else shown(meant),
            typed_key=key,
            leader=leader_in(lease),
            move=move,
            **around,
        )


def rewind(wiring: Wiring, plan: RewindPlan, *, asked: str, reason: str | None = None) -> Moved:
    """
    Do what was planned, all of it or nothing.

    Afterwards the next listener reads from there, and the audit record is stored.

    Args:
        asked: the place as it was given, for the audit record.
        reason: why, for people.

    Raises:
        CommandRefusedError: a listener leads, or has led since; or a partition is locked. Nothing is changed.
        ServerUnavailableError, DeploymentError: as for the commands.
    """
    with audited(wiring, "rewind", plan.subscription, to=asked, key=plan.typed_key, reason=reason) as act:
        store = wiring.store
        refuse_led(wiring, store)
        way = {"from": iso(plan.passed_from) or plan.at, "to": plan.to.iso, "reread": len(plan.reread)}
        try:
            moved = store.positions.move(plan.move, act.record(plan.subscription, **way))
        except PyMongoError as error:
            if is_lock(error):
                raise CommandRefusedError(LOCKED) from error
            raise
        if moved is None:
            refuse_led(wiring, store)
            raise CommandRefusedError(
                f"Subscription {plan.subscription} has changed since it was looked at: nothing is changed; repeat the "
                "command.",
            )
        return moved


# -- what commands on positions share --------------------------------------------------------------


def leader_in(lease: Mapping[str, Any]) -> str | None:
    """Who leads, for people; None where nobody does."""
    return f"process {lease.get('pid')} on {lease.get('host')}" if lease.get("live") else None


def refuse_led(wiring: Wiring, store: Store) -> None:
    """
    Positions are moved while nobody leads.

    Raises:
        CommandRefusedError: somebody does.
    """
    leader = leader_in(store.leases.read() or {})
    if leader is not None:
        raise CommandRefusedError(
            f"Bridge {wiring.name} is led by {leader}: nothing is changed. Stop all its listeners (workers may stay), "
            "repeat the command, and start them again.",
        )


def refuse_unknown(wiring: Wiring, subscription: str, known: Sequence[str]) -> CommandRefusedError:
    """The refusal of a subscription that is not stored."""
    if not known:
        return CommandRefusedError(f"Bridge {wiring.name} has never been led: it has no positions yet.")
    return CommandRefusedError(
        f"Bridge {wiring.name} has no subscription {subscription!r}{nearest(subscription, known)}; it has "
        f"{', '.join(known)}.",
    )


# -- inside ----------------------------------------------------------------------------------------


def _layout(wiring: Wiring, documents: Mapping[str, Mapping[str, Any]], subscription: str) -> Layout:
    layouts = layouts_in_force(documents.values())
    if subscription not in layouts:
        raise refuse_unknown(wiring, subscription, sorted(layouts))
    return layouts[subscription]


def _refuse_lost(line: CommandLine, subscription: str, document: Mapping[str, Any]) -> None:
    if parse_lost_history(document):
        raise CommandRefusedError(
            f"Subscription {subscription} has lost its history, so it cannot be sent anywhere: decide first with "
            f"`{line.changes('go-on', subscription, '--from', 'oldest')}` or "
            f"`{line.changes('go-on', subscription, '--from', 'now')}`.",
        )


def _moves(image: Image, to: StreamPlace, *, forward: bool) -> bool:
    """Return True if a partition is sent there."""
    place = str(to.token["_data"])
    return _own(image) < place if forward else _own(image) > place


def _own(image: Image) -> str:
    """Return where a partition is, as the comparable part of a token; what is handled counts as committed."""
    token = (image.handled or {}).get("resumeToken")
    return str(token["_data"]) if token else image.data


def _stands(image: Image) -> bool:
    """Whether anything runs or stands in a partition, which ends where nothing was committed there."""
    return image.claim is not None or image.head is not None or image.retry is not None


def _moves_watermark(document: Mapping[str, Any], to: StreamPlace, *, forward: bool, only: bool) -> bool:
    token, own = document.get("resumeToken"), parse_position(document)
    if forward:
        return not only and (own is None or own < to.time)
    if token:
        return str(token["_data"]) > str(to.token["_data"])
    return own is not None and own > to.time


def _nothing_to_do(subscription: str, document: Mapping[str, Any], to: StreamPlace, *, forward: bool) -> str:
    where = f"Subscription {subscription} stands at {iso(parse_position(document))}"
    if forward:
        return f"{where}, which is now: there is nothing to pass over."
    return f"{where}, and has handled nothing behind {to.iso}: there is nothing to send back (`--to now` goes forward)."


def _partition_move(store: Store, image: Image, layout: Layout, to: StreamPlace, *, forward: bool) -> PartitionMove:
    stored = 0
    if forward and image.spilled is not None:
        partition_id = store.partitions.partition_id(image.subscription, layout.generation, image.index)
        with pymongo.timeout(_READ_SECONDS):
            stored = store.backlog.count(partition_id, image.data, str(to.token["_data"]))
    return PartitionMove(
        index=image.index,
        standing=visible_state(image),
        at=iso(time_of_token(image.token, None)) if image.token else None,
        key=str(image.head["key"]) if image.state == "halted" and image.head is not None else None,
        running=image.live,
        stored=stored,
    )


def _around(
    wiring: Wiring,
    store: Store,
    images: Sequence[Image],
    layout: Layout,
    document: Mapping[str, Any],
    to: StreamPlace,
    moved: Sequence[PartitionMove],
    *,
    forward: bool,
) -> dict[str, Any]:
    """What else a plan says: forward, what is passed over; back, what lies behind the place and does not run again."""
    subscription, indexes = parse_name(document), {each.index for each in moved}
    if forward:
        going = [image for image in images if image.index in indexes]
        return {"passed_from": _passed_from(store, going, layout, to, parse_position(document))}
    data = str(to.token["_data"])
    letters = build_later_query(wiring.name, subscription, data)
    existing = {**letters, "change.operationType": SNAPSHOT}
    theirs = {"partition": {"$in": sorted(indexes)}}
    asked = {"replay.partitioningTerm": layout.generation, "replay.partition": {"$in": sorted(indexes)}}
    collection = store.dead_letters.collection
    with pymongo.timeout(_READ_SECONDS):
        return {
            "dead_letters": collection.count_documents({"$and": [letters, theirs]}),
            "documents": collection.count_documents({"$and": [existing, theirs]}),
            "replays": collection.count_documents({"$and": [letters, ASKED, asked]}),
            "snapshots": _read_behind(store, subscription, to),
        }


def _passed_from(
    store: Store, images: Sequence[Image], layout: Layout, to: StreamPlace, watermark: Timestamp | None
) -> Timestamp | None:
    """Return the time of the first change that is passed over: the watermark has passed changes that are stored."""
    times = [watermark]
    for image in images:
        times += [time_of_token(image.head["resumeToken"], None)] if image.head is not None else []
        if image.spilled is not None:
            partition_id = store.partitions.partition_id(image.subscription, layout.generation, image.index)
            with pymongo.timeout(_READ_SECONDS):
                first = store.backlog.first(partition_id, _own(image), str(to.token["_data"]))
            times += [time_of_token({"_data": first}, None)] if first is not None else []
    return min((time for time in times if time is not None), default=None)


def _read_behind(store: Store, subscription: str, to: StreamPlace) -> int:
    """How many snapshots of a subscription have read something since a place."""
    since = to.time.as_datetime().replace(tzinfo=None)
    return sum(
        each.subscription == subscription
        and (last := each.moved_at or each.started_at) is not None
        and last.replace(tzinfo=None) >= since
        for each in store.snapshots.read()
    )
