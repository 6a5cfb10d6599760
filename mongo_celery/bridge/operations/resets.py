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
from functools import partial
from typing import TYPE_CHECKING, Any

import pymongo
from bson import Timestamp

from mongo_celery.bridge.existing import SNAPSHOT
from mongo_celery.bridge.operations.acts import Act, reached, refuse_unknown
from mongo_celery.bridge.operations.keys import key_of, partition_of_key, quote_key
from mongo_celery.bridge.operations.places import NOW, OLDEST, StreamPlace, find_place
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


def plan_reset(act: Act, handler: str, to: str, *, key: str | None, source: str | None) -> Plan:
    """Plan to move a handler's position; see `Operations.reset`."""
    wiring = act.wiring
    with reached(wiring) as store:
        documents = {parse_name(document): document for document in store.subscriptions.read_all()}
        if handler not in documents:
            raise refuse_unknown(wiring, handler, documents)
        lost = parse_lost_history(documents[handler])
        if lost:
            if to not in (OLDEST, NOW) or key is not None:
                ways = (act.line.changes("reset", handler, "--to", word) for word in (OLDEST, NOW))
                raise CommandRefusedError(
                    f"The oplog no longer reaches the position of handler {handler}, so it cannot be sent to another "
                    f"place. Decide first with `{'` or `'.join(ways)}`.",
                )
            return _plan_passing(act, handler, lost, to, store)
        move, fields = _read(act, store, documents[handler], to, key, source)
    way = "Pass over what lies between?" if move.forward else "Handle all of that again?"
    return Plan(
        command=act.command,
        lines=[*_describe(fields, act.line)],
        fields={"bridge": wiring.name, **fields},
        question=None if fields["leader"] else way,
        seen=_name_seen(move, fields),
        act=partial(act.run, partial(_move, move, fields)),
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
    images = store.partitions.of({handler: layouts[handler].term}) if handler in layouts else []
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


def _name_seen(move: Move, fields: Mapping[str, Any]) -> str:
    """Name the term and the partitions of a move. `now` is another place at each reading, so it is left out."""
    partitions = [f"{each['index']}:{each['state']}:{each['key'] or ''}" for each in fields["partitions"]]
    return " ".join([f"{move.subscription}/{move.generation}/{move.term}", *partitions])


def _move(move: Move, planned: Mapping[str, Any], running: Act) -> PlanResult:
    """Do what was planned, all of it or nothing."""
    wiring, line, handler = running.wiring, running.line, move.subscription
    store = wiring.store
    way = {"from": planned["passed_from"] or planned["from"], "to": planned["to"], "reread": len(planned["reread"])}
    leader = leader_in(store.leases.read() or {})
    moved = None if leader else store.positions.move(move, running.record(handler, **way))
    if moved is None:
        leader = leader or leader_in(store.leases.read() or {})
        raise CommandRefusedError(_refuse_led(wiring, leader)) if leader else _refuse_moved(handler)
    count = number(len(moved.partitions) + len(planned["reread"]), "partition", "partitions")
    word = "passed over what came before" if move.forward else "back at"
    lines = [f"{handler}: {word} {moment(planned['to'])} ({count}). Start a listener to continue."]
    if planned["passed_from"] is not None:
        again = line.changes("reset", handler, "--to", planned["passed_from"])
        lines += ["To handle what was passed over after all, while the oplog has it:", f"  {again}"]
    if any(each["stored"] for each in planned["partitions"]):
        again = line.changes("snapshot", "start", handler)
        lines += ["Snapshot rows that were stored are in no stream. To read them again:", f"  {again}"]
    return PlanResult(lines=lines, fields={"moved": list(moved.partitions), "withdrawn": moved.withdrawn})


def _refuse_moved(handler: str) -> CommandRefusedError:
    return CommandRefusedError(
        f"Handler {handler} has changed since it was looked at: nothing is changed. Repeat the command."
    )


def _read(
    act: Act, store: Store, document: Mapping[str, Any], text: str, key: str | None, source: str | None
) -> tuple[Move, dict[str, Any]]:
    """
    Look at what sending a handler to a place would do.

    Returns:
        The move, and the fields of the plan. `partitions` are those that are sent there, or in which something ends.
        `reread` are the others that are read again from there: they handle what they have not handled. `passed_from` is
        the time of the first change that a way forward passes over. `dead_letters` of changes after the place stay, and
        `replays` of these are withdrawn. `documents` of these, and what `snapshots` have given, do not run again.

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
    to = find_place(wiring, text)
    forward = text == NOW
    images = store.partitions.of({handler: layout.term})
    sent = [each for each in images if chosen in (None, each.index) and _is_sent(each, to, forward=forward)]
    is_watermark_moved = _is_watermark_moved(document, to, forward=forward, is_alone=chosen is not None)
    if not sent and not is_watermark_moved:
        raise CommandRefusedError(_refuse_idle(handler, document, to, forward=forward))
    sent += [each for each in images if not forward and not _own(each) and _is_busy(each)]
    others = sorted(each.index for each in images if each not in sent)
    reread = others if is_watermark_moved and not forward else []
    passed_from = _passed_from(store, sent, layout, to, parse_position(document)) if forward else None
    move = Move(
        subscription=handler,
        token=to.token,
        time=to.time,
        forward=forward,
        generation=layout.term,
        term=int(lease.get("term", 0)),
        partition=chosen,
        since=passed_from,
    )
    partitions = [_describe_partition(store, each, layout, to, forward=forward) for each in sent]
    return move, {
        "subscription": handler,
        "to": to.iso,
        "token": to.token["_data"],
        "from": iso(parse_position(document)),
        "forward": forward,
        "passed_from": iso(passed_from),
        "partitions": sorted(partitions, key=lambda each: int(each["index"])),
        "reread": reread,
        "staying": len(others) - len(reread),
        "key": None if key is None else quote_key(meant),
        "leader": leader_in(lease),
        **_count_after(act, store, handler, layout, to, [] if forward else [each.index for each in sent]),
    }


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


def _describe_partition(
    store: Store, image: Image, layout: Layout, to: StreamPlace, *, forward: bool
) -> dict[str, Any]:
    """Return a partition that is sent there, as JSON. `stored` changes of a way forward are never handled."""
    stored = 0
    if forward and image.spilled is not None:
        partition_id = store.partitions.partition_id(image.subscription, layout.term, image.index)
        with pymongo.timeout(_READ_SECONDS):
            stored = store.backlog.count(partition_id, image.data, str(to.token["_data"]))
    return {
        "index": image.index,
        "state": visible_state(image),
        "at": iso(time_of_token(image.token, None)) if image.token else None,
        "key": str(image.head["key"]) if image.state == "halted" and image.head is not None else None,
        "running": image.live,
        "stored": stored,
    }


def _count_after(
    act: Act, store: Store, handler: str, layout: Layout, to: StreamPlace, indexes: Sequence[int]
) -> dict[str, int]:
    """Count what lies after the place in partitions that go back, and does not run again."""
    names = ("dead_letters", "documents", "replays", "snapshots")
    if not indexes:
        return dict.fromkeys(names, 0)
    data = str(to.token["_data"])
    letters = build_later_query(act.wiring.name, handler, data)
    existing = {**letters, "change.operationType": SNAPSHOT}
    theirs = {"partition": {"$in": sorted(indexes)}}
    asked = {"replay.partitioningTerm": layout.term, "replay.partition": {"$in": sorted(indexes)}}
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
            partition_id = store.partitions.partition_id(image.subscription, layout.term, image.index)
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


def _describe(found: Mapping[str, Any], line: CommandLine) -> list[str]:
    """Return the lines that say what a reset would do, and what else a person should know before."""
    forward, partitions, reread = found["forward"], found["partitions"], found["reread"]
    start = moment(found["passed_from"] or found["from"])
    way = "goes forward" if forward else "goes back"
    lines = [f"{found['subscription']} {way} to {moment(found['to'])}, from {start}"]
    if partitions or not reread:
        stay = f"; {found['staying']} stay where they are" if found["staying"] else ""
        moved = _list([each["index"] for each in partitions])
        lines.append(f"  {number(len(partitions), 'partition', 'partitions')}: {moved}{stay}")
    if reread:
        others = number(len(reread), "partition is", "partitions are")
        lines.append(f"  {others} read again: {_list(reread)}. They handle what they have not handled yet")
    ends = "it is passed over" if forward else "it runs again"
    lines += [f"  {each['index']} is halted at {each['key']}: {ends}" for each in partitions if each["key"] is not None]
    for text, indexes in (
        (
            "retries that are due later end in",
            [e["index"] for e in partitions if e["state"] in ("retrying", "waiting")],
        ),
        ("still paused afterwards:", [each["index"] for each in partitions if each["state"] == "paused"]),
        ("handlers run now, their outcome is refused, in", [each["index"] for each in partitions if each["running"]]),
    ):
        lines += [f"  {text} {_list(indexes)}"] if indexes else []
    if found["key"] is not None:
        lines.append(f"  all keys that share a partition with {found['key']} come along")
    if forward:
        if stored := sum(each["stored"] for each in partitions):
            lines.append(f"  up to {number(stored, 'stored change', 'stored changes')} will never be handled")
        lines.append("  changes since then that are not handled yet will not be; a reset to that time runs them later")
    return lines + [f"  {text}" for text in _describe_after(found, line)]


def _describe_after(found: Mapping[str, Any], line: CommandLine) -> list[str]:
    """Return the lines on what lies after the place and does not run again."""
    lines = []
    if found["dead_letters"]:
        letters = number(found["dead_letters"], "dead letter", "dead letters")
        lines.append(f"{letters} after it stay: discard those of changes that have succeeded then")
    if found["documents"]:
        rows = number(found["documents"], "of them is of a snapshot row", "of them are of snapshot rows")
        lines.append(f"{rows}, and would not run again: replay these when the handler has caught up")
    if found["snapshots"]:
        again = line.changes("snapshot", "start", found["subscription"])
        lines.append(
            "snapshot rows after it are not given again. If the handler has operations, fields or match, targets may "
            f"end at older states: run `{again}` afterwards"
        )
    if found["replays"]:
        lines.append(f"{number(found['replays'], 'replay', 'replays')} of these will not be made")
    if found["leader"] is not None:
        lines.append(f"a listener leads ({found['leader']}): stop all of them first")
    return lines
