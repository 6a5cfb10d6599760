"""
The reset of a handler: back to a place in the stream, forward to now, or over history that it has lost.

What would be done is read first, for the person who decides. Then it is done in one transaction with its audit record.
See `state/positions.py` for what makes it safe.

Backwards: everything after the place is read and handled again, in order. Fenced targets take it, under fencing tokens
that are newer than all before: a target goes through its older states once more, up to the present one, and what was
running before cannot write over it. Forward: what lies between is passed over, and noted as a gap. Both need a bridge
that no listener leads.

Over lost history: the handler continues, and what it has not read is given up. What was read is stored or buffered, and
runs. A listener that leads reads the position again within a second; else the next one begins there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pymongo
from bson import Timestamp

from mongo_celery.bridge.existing import SNAPSHOT
from mongo_celery.bridge.operations.acts import Act, reached, refuse_unknown
from mongo_celery.bridge.operations.keys import key_of, partition_of_key, shown
from mongo_celery.bridge.operations.places import NOW, OLDEST, Asked, Reach, StreamPlace, parse_place, place_of
from mongo_celery.bridge.operations.times import iso
from mongo_celery.bridge.state.dead_letters import ASKED, build_later_query
from mongo_celery.bridge.state.partitions import Image, visible_state
from mongo_celery.bridge.state.positions import Move
from mongo_celery.bridge.state.store import Store
from mongo_celery.bridge.state.subscriptions import (
    Layout,
    layouts_in_force,
    parse_lost_history,
    parse_name,
    parse_position,
)
from mongo_celery.errors import CommandRefusedError
from mongo_celery.mongo.oplog import operation_time, read_oplog, time_of_token
from mongo_celery.plan import Plan, PlanResult
from mongo_celery.quantities import moment, number

if TYPE_CHECKING:
    from mongo_celery.bridge.wiring import Wiring
    from mongo_celery.command_line import CommandLine

_READ_SECONDS = 10.0
_NAMED = 10


@dataclass(frozen=True, slots=True)
class PartitionMove:
    """
    One partition that is sent to the place.

    Attributes:
        state: as `status` has it.
        at: time of the last change that it has handled; None where there is none.
        key: of the change at which it has halted.
        running: whether a handler runs there at this moment.
        stored: how many of its changes are stored and not handled, at most; 0 where they stay.
    """

    index: int
    state: str
    at: str | None
    key: str | None
    running: bool
    stored: int = 0


@dataclass(frozen=True, slots=True)
class _Reset:
    """
    A reset as it was planned.

    Attributes:
        to: the place.
        at: position of the handler, as a time.
        passed_from: the time of the first change that a way forward passes over; None for one back.
        documents: how many of these dead letters are of existing documents, which do not run again.
        snapshots: how many snapshots have given existing documents after the place, which do not run again.
        partitions: those that would be sent there, or in which something ends.
        reread: indexes of the others that are read again from there. They handle what they have not handled.
        staying: how many are left as they are.
        dead_letters: how many of its dead letters are of changes after the place; they stay.
        replays: how many replays of these that were asked for would be withdrawn.
        key: whose partition it is, for people; None for all.
        leader: the listener that leads, which keeps it from being done; None where none does.
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
    reread: Sequence[int] = ()

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        alike = ("subscription", "forward", "documents", "snapshots", "staying", "dead_letters", "replays", "key")
        return {
            **{name: getattr(self, name) for name in (*alike, "leader")},
            "to": self.to.iso,
            "token": self.to.token["_data"],
            "from": self.at,
            "passed_from": iso(self.passed_from),
            "partitions": [asdict(each) for each in self.partitions],
            "reread": list(self.reread),
        }


def plan_reset(act: Act, handler: str, to: str, *, key: str | None, source: str | None) -> Plan:
    """Plan to move a handler's position; see `Operations.reset`."""
    wiring, asked = act.wiring, parse_place(to)
    with reached(wiring) as store:
        documents = {parse_name(document): document for document in store.subscriptions.read_all()}
        if handler not in documents:
            raise refuse_unknown(wiring, handler, documents)
        lost = parse_lost_history(documents[handler])
        if lost:
            if asked.word is None or key is not None:
                ways = (act.line.changes("reset", handler, "--to", word) for word in (OLDEST, NOW))
                raise CommandRefusedError(
                    f"The oplog no longer reaches the position of handler {handler}, so it cannot be sent to another "
                    f"place. Decide first with `{'` or `'.join(ways)}`.",
                )
            return _plan_passing(act, handler, lost, asked.word, store)
        found = _read(act, store, documents[handler], asked, key, source)
    way = "Pass over what lies between?" if found.forward else "Handle all of that again?"
    return Plan(
        command=act.command,
        lines=[*_describe(found, act.line)],
        fields={"bridge": wiring.name, **found.plain()},
        question=None if found.leader else way,
        act=partial(act.run, partial(_move, found)),
    )


def leader_in(lease: Mapping[str, Any]) -> str | None:
    """Return who leads, for people; None where nobody does."""
    return f"process {lease.get('pid')} on {lease.get('host')}" if lease.get("live") else None


def _refuse_led(wiring: Wiring, leader: str) -> str:
    return (
        f"Bridge {wiring.name} is led by {leader}: nothing is changed. Stop all its listeners (workers may stay), "
        "repeat the command, and start them again."
    )


# -- over lost history -----------------------------------------------------------------------------


def _plan_passing(act: Act, handler: str, lost: Mapping[str, Any], policy: str, store: Store) -> Plan:
    """Plan to pass over history that is lost. `lost` is the record as it was read: only this one is settled."""
    wiring = act.wiring
    layouts = layouts_in_force(store.subscriptions.read_all())
    images = store.partitions.of({handler: layouts[handler].generation}) if handler in layouts else []
    stored = sorted(image.index for image in images if image.spilled)
    lines = [f"{handler}: the oplog no longer reaches {_moment(lost['at'])}", f"  {lost.get('error')}"]
    lines += [f"  stored changes of partitions {_list(stored)} run all the same"] if stored else []

    def run(running: Act) -> PlanResult:
        now = operation_time(wiring.client)
        place = read_oplog(wiring.client).first if policy == OLDEST else Timestamp(now.time, now.inc + 1)
        start = max(place, lost["at"])
        record = running.record(handler, handlers=1, **{"from": iso(lost["at"]), "to": iso(start)})
        if not wiring.store.positions.pass_gap(handler, lost, start, policy, record):
            raise _refuse_moved(handler)
        return PlanResult(
            lines=[f"{handler} continues at {_moment(start)} ({policy}); without a listener, when one starts"],
            fields={"to": iso(start)},
        )

    return Plan(
        command=act.command,
        lines=lines,
        fields={"bridge": wiring.name, "subscription": handler, "from": iso(lost["at"]), "to": None, "stored": stored},
        question="Give up the changes that it has not read?",
        seen=str(iso(lost["at"])),
        act=partial(act.run, run),
    )


# -- back and forward ------------------------------------------------------------------------------


def _move(found: _Reset, running: Act) -> PlanResult:
    """Do what was planned, all of it or nothing."""
    wiring = running.wiring
    store, line = wiring.store, running.line
    way = {"from": iso(found.passed_from) or found.at, "to": found.to.iso, "reread": len(found.reread)}
    leader = leader_in(store.leases.read() or {})
    moved = None if leader else store.positions.move(found.move, running.record(found.subscription, **way))
    if moved is None:
        leader = leader or leader_in(store.leases.read() or {})
        raise CommandRefusedError(_refuse_led(wiring, leader)) if leader else _refuse_moved(found.subscription)
    count = number(len(moved.partitions) + len(found.reread), "partition", "partitions")
    word = "passed over what came before" if found.forward else "back at"
    lines = [f"{found.subscription}: {word} {_moment(found.to.time)} ({count}). Start a listener to continue."]
    if found.passed_from is not None:
        again = line.changes("reset", found.subscription, "--to", str(iso(found.passed_from)))
        lines += ["To handle what was passed over after all, while the oplog has it:", f"  {again}"]
    if found.forward and any(each.stored for each in found.partitions):
        again = line.changes("snapshot", "start", found.subscription)
        lines += ["Snapshot rows that were stored are in no stream. To read them again:", f"  {again}"]
    return PlanResult(lines=lines, fields={"moved": list(moved.partitions), "withdrawn": moved.withdrawn})


def _refuse_moved(handler: str) -> CommandRefusedError:
    return CommandRefusedError(
        f"Handler {handler} has changed since it was looked at: nothing is changed. Repeat the command."
    )


def _read(
    act: Act, store: Store, document: Mapping[str, Any], asked: Asked, key: str | None, source: str | None
) -> _Reset:
    """
    Look at what sending a handler to a place would do.

    Raises:
        CommandRefusedError: there is no such place, or nothing to do.
    """
    wiring, handler = act.wiring, parse_name(document)
    lease = store.leases.read() or {}
    layout = layouts_in_force([document])[handler]
    chosen = meant = None
    if key is not None:
        meant = key_of(wiring, handler, layout, key, source)
        chosen = partition_of_key(wiring, handler, layout, meant, source)
    to = place_of(wiring, asked, Reach.of(wiring.client), "--to")
    forward = asked.word == NOW
    images = store.partitions.of({handler: layout.generation})
    sent = [each for each in images if chosen in (None, each.index) and _is_sent(each, to, forward=forward)]
    is_watermark_moved = _is_watermark_moved(document, to, forward=forward, is_alone=chosen is not None)
    if not sent and not is_watermark_moved:
        raise CommandRefusedError(_refuse_idle(handler, document, to, forward=forward))
    sent += [each for each in images if not forward and not _own(each) and _is_busy(each)]
    moved = [_partition_move(store, each, layout, to, forward=forward) for each in sent]
    others = sorted(each.index for each in images if each not in sent)
    reread = others if is_watermark_moved and not forward else []
    around: dict[str, Any]
    if forward:
        around = {"passed_from": _passed_from(store, sent, layout, to, parse_position(document))}
    else:
        around = _count_after(act, store, handler, layout, to, [each.index for each in sent])
    move = Move(
        subscription=handler,
        token=to.token,
        time=to.time,
        forward=forward,
        generation=layout.generation,
        term=int(lease.get("term", 0)),
        partition=chosen,
        since=around.get("passed_from"),
    )
    return _Reset(
        subscription=handler,
        to=to,
        at=iso(parse_position(document)),
        forward=forward,
        partitions=sorted(moved, key=lambda each: each.index),
        reread=reread,
        staying=len(others) - len(reread),
        key=None if key is None else shown(meant),
        leader=leader_in(lease),
        move=move,
        **around,
    )


def _is_sent(image: Image, to: StreamPlace, *, forward: bool) -> bool:
    """Return True if a partition is sent there."""
    place = str(to.token["_data"])
    return _own(image) < place if forward else _own(image) > place


def _own(image: Image) -> str:
    """Return where a partition is, as the comparable part of a token; what is handled counts as committed."""
    token = (image.handled or {}).get("resumeToken")
    return str(token["_data"]) if token else image.data


def _is_busy(image: Image) -> bool:
    """Return True if anything runs or is blocked in a partition, which ends where nothing was committed there."""
    return image.claim is not None or image.head is not None or image.retry is not None


def _is_watermark_moved(document: Mapping[str, Any], to: StreamPlace, *, forward: bool, is_alone: bool) -> bool:
    token, own = document.get("resumeToken"), parse_position(document)
    if forward:
        return not is_alone and (own is None or own < to.time)
    if token:
        return str(token["_data"]) > str(to.token["_data"])
    return own is not None and own > to.time


def _refuse_idle(handler: str, document: Mapping[str, Any], to: StreamPlace, *, forward: bool) -> str:
    where = f"The position of handler {handler} is {iso(parse_position(document))}"
    if forward:
        return f"{where}, which is now: there is nothing to pass over."
    return f"{where}, and it has handled nothing after {to.iso}: there is nothing to handle again. `now` goes forward."


def _partition_move(store: Store, image: Image, layout: Layout, to: StreamPlace, *, forward: bool) -> PartitionMove:
    stored = 0
    if forward and image.spilled is not None:
        partition_id = store.partitions.partition_id(image.subscription, layout.generation, image.index)
        with pymongo.timeout(_READ_SECONDS):
            stored = store.backlog.count(partition_id, image.data, str(to.token["_data"]))
    return PartitionMove(
        index=image.index,
        state=visible_state(image),
        at=iso(time_of_token(image.token, None)) if image.token else None,
        key=str(image.head["key"]) if image.state == "halted" and image.head is not None else None,
        running=image.live,
        stored=stored,
    )


def _count_after(
    act: Act, store: Store, handler: str, layout: Layout, to: StreamPlace, indexes: Sequence[int]
) -> dict[str, Any]:
    """Count what lies after the place and does not run again."""
    data = str(to.token["_data"])
    letters = build_later_query(act.wiring.name, handler, data)
    existing = {**letters, "change.operationType": SNAPSHOT}
    theirs = {"partition": {"$in": sorted(indexes)}}
    asked = {"replay.partitioningTerm": layout.generation, "replay.partition": {"$in": sorted(indexes)}}
    collection = store.dead_letters.collection
    since = to.time.as_datetime().replace(tzinfo=None)
    snapshots = [each for each in store.snapshots.read() if each.subscription == handler]
    last = [each.moved_at or each.started_at for each in snapshots]
    with pymongo.timeout(_READ_SECONDS):
        return {
            "dead_letters": collection.count_documents({"$and": [letters, theirs]}),
            "documents": collection.count_documents({"$and": [existing, theirs]}),
            "replays": collection.count_documents({"$and": [letters, ASKED, asked]}),
            "snapshots": sum(each is not None and each.replace(tzinfo=None) >= since for each in last),
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


# -- for people ------------------------------------------------------------------------------------


def _moment(time: Timestamp | None) -> str:
    return moment(iso(time))


def _list(indexes: Sequence[int]) -> str:
    more = f" and {len(indexes) - _NAMED} more" if len(indexes) > _NAMED else ""
    return (", ".join(map(str, sorted(indexes)[:_NAMED])) or "none") + more


def _describe(found: _Reset, line: CommandLine) -> list[str]:
    """Return the lines that say what a reset would do, and what else a person should know before."""
    way = "goes forward" if found.forward else "goes back"
    lines = [
        f"{found.subscription} {way} to {_moment(found.to.time)}, from {moment(iso(found.passed_from) or found.at)}"
    ]
    moved = [each.index for each in found.partitions]
    if moved or not found.reread:
        stay = f"; {found.staying} stay where they are" if found.staying else ""
        lines.append(f"  {number(len(moved), 'partition', 'partitions')}: {_list(moved)}{stay}")
    if found.reread:
        others = number(len(found.reread), "partition is", "partitions are")
        lines.append(f"  {others} read again: {_list(found.reread)}. They handle what they have not handled yet")
    ends = "it is passed over" if found.forward else "it runs again"
    lines += [f"  {each.index} is halted at {each.key}: {ends}" for each in found.partitions if each.key is not None]
    states = (
        (
            "retries that are due later end in",
            [each.index for each in found.partitions if each.state in ("retrying", "waiting")],
        ),
        ("still paused afterwards:", [each.index for each in found.partitions if each.state == "paused"]),
        ("handlers run now, their outcome is refused, in", [each.index for each in found.partitions if each.running]),
    )
    lines += [f"  {text} {_list(indexes)}" for text, indexes in states if indexes]
    if found.key is not None:
        lines.append(f"  all keys that share a partition with {found.key} come along")
    if found.forward:
        stored = sum(each.stored for each in found.partitions)
        lines += (
            [f"  up to {number(stored, 'stored change', 'stored changes')} will never be handled"] if stored else []
        )
        lines.append("  changes since then that are not handled yet will not be; a reset to that time runs them later")
    return lines + [f"  {text}" for text in _describe_after(found, line)]


def _describe_after(found: _Reset, line: CommandLine) -> list[str]:
    """Return the lines on what lies after the place and does not run again."""
    lines = []
    if found.dead_letters:
        letters = number(found.dead_letters, "dead letter", "dead letters")
        lines.append(f"{letters} after it stay: discard those of changes that have succeeded then")
    if found.documents:
        rows = number(found.documents, "of them is of a snapshot row", "of them are of snapshot rows")
        lines.append(f"{rows}, and would not run again: replay these when the handler has caught up")
    if found.snapshots:
        again = line.changes("snapshot", "start", found.subscription)
        lines.append(
            "snapshot rows after it are not given again. If the handler has operations, fields or match, targets may "
            f"end at older states: run `{again}` afterwards"
        )
    if found.replays:
        lines.append(f"{number(found.replays, 'replay', 'replays')} of these will not be made")
    if found.leader is not None:
        lines.append(f"a listener leads ({found.leader}): stop all of them first")
    return lines
