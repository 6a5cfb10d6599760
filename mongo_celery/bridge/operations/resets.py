"""
The reset of a handler: back to a place in the stream, forward to now, or over an oplog gap.

First the effect is computed, for the person who decides. Then one transaction performs the move, with its audit record.
`state/positions.py` explains its safety.

Backwards: everything after the place is read and handled again, in order. Fenced targets accept it, because its fencing
tokens are newer than all before. A target passes through its older states up to the present one, and earlier executions
cannot overwrite it. Gaps end at the place. Forward: changes in between are skipped, and recorded as a gap. With a key,
only its partition moves, and the gaps of the handler stay as they are. All need a bridge without a leading listener.

Over an oplog gap: the handler continues, and gives up unread changes. Changes that were read are stored or buffered,
and run. A leading listener reads the position again within a second. Without one, the next listener begins there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pymongo
from bson import Timestamp

from mongo_celery.bridge.existing import place_at_time
from mongo_celery.bridge.operations.acts import Act, reached, refuse_unknown
from mongo_celery.bridge.operations.keys import find_key, key_json, quote_key
from mongo_celery.bridge.operations.places import NOW, OLDEST, find_place
from mongo_celery.bridge.operations.times import iso
from mongo_celery.bridge.state.dead_letters import build_later_query
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
from mongo_celery.findings import list_some
from mongo_celery.mongo.oplog import earliest_token, operation_time, read_oplog, time_of_token
from mongo_celery.plan import Plan, PlanResult
from mongo_celery.quantities import moment, number

_READ_SECONDS = 10.0
_NAMED = 10
_RUNNING, _PAUSED = "the result of the running handler will be refused", "it stays paused"


def plan_reset(act: Act, handler: str, to: str, *, key: str | None, source: str | None) -> Plan:
    """Plan to move a handler's position, as in `Operations.reset`."""
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
                    f"The oplog no longer reaches the position of handler {handler}, so it can only continue at the "
                    f"oldest entry or now. Run `{'` or `'.join(ways)}`.",
                )
            return _plan_passing(act, handler, lost, to, store)
        move, fields, chosen = _read_move(act, store, documents[handler], to, key, source)
    way = "Skip these changes?" if move.forward else "Handle these changes again?"
    return act.plan(
        _describe_move(fields, act),
        partial(_run_move, move, fields, chosen),
        fields,
        question=None if fields["leader"] else way,
        seen=_name_seen(move, fields),
    )


def leader_in(lease: Mapping[str, Any]) -> str | None:
    """Describe the leading listener. None if there is none."""
    return f"process {lease.get('pid')} on {lease.get('host')}" if lease.get("live") else None


def _refuse_led(act: Act, leader: str) -> CommandRefusedError:
    return CommandRefusedError(
        f"A listener of bridge {act.wiring.name} is running ({leader}), so nothing is changed. Stop all listeners, "
        "repeat the command, and start them again. Workers may keep running."
    )


# -- over an oplog gap -----------------------------------------------------------------------------


def _plan_passing(act: Act, handler: str, lost: Mapping[str, Any], policy: str, store: Store) -> Plan:
    """Plan to skip an oplog gap. `lost` is its record as read, and only this one is settled."""
    wiring = act.wiring
    layouts = layouts_in_force(store.subscriptions.read_all())
    images = store.partitions.of({handler: layouts[handler].term}) if handler in layouts else []
    stored = sorted(image.index for image in images if image.stored)
    lines = [f"{handler}: the oplog no longer reaches {moment(iso(lost['at']))}", f"  {lost.get('error')}"]
    lines += [f"  stored changes of partitions {list_some(stored, _NAMED)} will still run"] if stored else []

    def run(running: Act) -> PlanResult:
        now = operation_time(wiring.client)
        place = read_oplog(wiring.client).first if policy == OLDEST else Timestamp(now.time, now.inc + 1)
        start = max(place, lost["at"])
        record = running.record(handler, handlers=1, **{"from": iso(lost["at"]), "to": iso(start)})
        if not wiring.store.positions.pass_gap(handler, lost, start, policy, record):
            raise _refuse_moved(handler)
        return PlanResult(
            lines=[f"{handler} continues at {moment(iso(start))} ({policy}) as soon as a listener is running"],
            fields={"to": iso(start)},
        )

    return act.plan(
        lines,
        run,
        {"handler": handler, "from": iso(lost["at"]), "to": None, "stored": stored},
        question="Skip the changes that the oplog no longer has?",
        seen=str(iso(lost["at"])),
    )


# -- back and forward ------------------------------------------------------------------------------


def _name_seen(move: Move, fields: Mapping[str, Any]) -> str:
    """Name the term and the partitions of a move. `now` changes with each reading, so it is left out."""
    partitions = [f"{each['partition']}:{each['state']}:{each['key'] or ''}" for each in fields["partitions"]]
    return " ".join([f"{move.subscription}/{move.partitioning}/{move.term}", *partitions])


def _run_move(move: Move, planned: Mapping[str, Any], chosen: Sequence[str], running: Act) -> PlanResult:
    """Perform the plan, completely or not at all. `chosen` are the options that select its partition."""
    wiring, line, handler = running.wiring, running.line, move.subscription
    store = wiring.store
    way = {"from": planned["passed_from"] or planned["from"], "to": planned["to"], "reread": len(planned["reread"])}
    leader = leader_in(store.leases.read() or {})
    moved = None if leader else store.positions.move(move, running.record(handler, **way))
    if moved is None:
        leader = leader or leader_in(store.leases.read() or {})
        raise _refuse_led(running, leader) if leader else _refuse_moved(handler)
    count = number(len(moved.partitions) + len(planned["reread"]), "partition", "partitions")
    word = "skipped all changes before" if move.forward else "back at"
    lines = [f"{handler}: {word} {moment(planned['to'])} ({count}). Start a listener to continue."]
    if planned["passed_from"] is not None:
        again = line.changes("reset", handler, "--to", planned["passed_from"], *chosen)
        lines += ["To handle the skipped changes after all, while the oplog has them:", f"  {again}"]
    if any(each["stored"] for each in planned["partitions"]):
        again = line.changes("snapshot", "start", handler)
        lines += ["Stored snapshot rows were skipped as well. To read these documents again:", f"  {again}"]
    return PlanResult(lines=lines, fields={"moved": list(moved.partitions), "withdrawn": moved.withdrawn})


def _refuse_moved(handler: str) -> CommandRefusedError:
    return CommandRefusedError(
        f"The position of handler {handler} has changed meanwhile, so the command has done nothing. Repeat it."
    )


def _read_move(
    act: Act, store: Store, document: Mapping[str, Any], text: str, key: str | None, source: str | None
) -> tuple[Move, dict[str, Any], list[str]]:
    """
    Read the state, and compute the effect of moving a handler to a place.

    Returns:
        The move, the plan's fields, and the options that select the same partition. `partitions` are moved, or some of
        their work ends. `reread` are the others that are read again from there, and handle only unhandled changes.
        `passed_from` is the time of the first change that a forward move skips. `dead_letters` of later changes stay.
        Later rows of `snapshots` do not run again.

    Raises:
        CommandRefusedError: the place does not exist, or there is nothing to do.
    """
    wiring, handler = act.wiring, parse_name(document)
    lease = store.leases.read() or {}
    layout = layouts_in_force([document])[handler]
    chosen, quoted, options = _choose_partition(act, handler, layout, key, source)
    to = find_place(wiring, text)
    forward = text == NOW
    images = store.partitions.of({handler: layout.term})
    sent = [each for each in images if chosen in (None, each.index) and _is_sent(each, to, forward=forward)]
    is_watermark_moved = _is_watermark_moved(document, to, forward=forward, is_alone=chosen is not None)
    if not sent and not is_watermark_moved:
        raise CommandRefusedError(_refuse_idle(handler, document, to, forward=forward))
    sent += [each for each in images if not forward and not _find_own_place(each) and _is_busy(each)]
    others = sorted(each.index for each in images if each not in sent)
    reread = others if is_watermark_moved and not forward else []
    passed_from = _passed_from(store, sent, to, parse_position(document)) if forward else None
    move = Move(
        subscription=handler,
        token=earliest_token(to),
        time=to,
        forward=forward,
        partitioning=layout.term,
        term=int(lease.get("term", 0)),
        partition=chosen,
        since=passed_from,
    )
    partitions = [_describe_partition(store, each, to, forward=forward) for each in sent]
    fields = {
        "handler": handler,
        "to": iso(to),
        "token": place_at_time(to),
        "from": iso(parse_position(document)),
        "forward": forward,
        "passed_from": iso(passed_from),
        "partitions": sorted(partitions, key=lambda each: int(each["partition"])),
        "reread": reread,
        "staying": len(others) - len(reread),
        "key": quoted,
        "leader": leader_in(lease),
        **_count_after(act, store, handler, to, [] if forward else [each.index for each in sent]),
    }
    return move, fields, options


def _choose_partition(
    act: Act, handler: str, layout: Layout, key: str | None, source: str | None
) -> tuple[int | None, str | None, list[str]]:
    """Return the partition of a key, the quoted key, and the options that select it. None without a key."""
    if key is None:
        return None, None, []
    meant, hash_ = find_key(act.wiring, handler, layout, key, source)
    options = ["--key", key_json(meant), *(["--source", source] if source else [])]
    return hash_ % layout.partitions, quote_key(meant), options


def _is_sent(image: Image, to: Timestamp, *, forward: bool) -> bool:
    """Return True if a partition is moved there."""
    own, place = _find_own_place(image), place_at_time(to)
    return own < place if forward else own > place


def _find_own_place(image: Image) -> str:
    """Return a partition's place, as the comparable part of a token. Handled changes count as committed."""
    token = (image.handled or {}).get("resumeToken")
    return str(token["_data"]) if token else image.data


def _is_busy(image: Image) -> bool:
    """Return True if a partition has running or blocked work, which a move ends."""
    return image.claim is not None or image.head is not None or image.retry is not None


def _is_watermark_moved(document: Mapping[str, Any], to: Timestamp, *, forward: bool, is_alone: bool) -> bool:
    token, own = document.get("resumeToken"), parse_position(document)
    if forward:
        return not is_alone and (own is None or own < to)
    if token:
        return str(token["_data"]) > place_at_time(to)
    return own is not None and own > to


def _refuse_idle(handler: str, document: Mapping[str, Any], to: Timestamp, *, forward: bool) -> str:
    where = f"The position of handler {handler} is {iso(parse_position(document))}"
    if forward:
        return f"{where}, and there are no later changes to skip."
    return f"{where}. It has handled no change after {iso(to)}, so there is none to handle again."


def _describe_partition(store: Store, image: Image, to: Timestamp, *, forward: bool) -> dict[str, Any]:
    """Return a moved partition in JSON form. `stored` changes of a forward move are never handled."""
    stored = 0
    if forward and image.stored is not None:
        with pymongo.timeout(_READ_SECONDS):
            stored = store.backlog.count(image.id, image.data, place_at_time(to))
    is_halted = image.state == "halted" and image.head is not None
    return {
        "partition": image.index,
        "state": "running" if image.live else visible_state(image),
        "key": str((image.head or {})["key"]) if is_halted else None,
        "stored": stored,
    }


def _count_after(act: Act, store: Store, handler: str, to: Timestamp, indexes: Sequence[int]) -> dict[str, int]:
    """Count the later data that does not run again, in partitions that go back."""
    if not indexes:
        return {"dead_letters": 0, "snapshots": 0}
    since = to.as_datetime().replace(tzinfo=None)
    given = [each.moved_at or each.started_at for each in store.snapshots.read() if each.subscription == handler]
    after = build_later_query(act.wiring.name, handler, place_at_time(to))
    with pymongo.timeout(_READ_SECONDS):
        query = {"$and": [after, {"partition": {"$in": sorted(indexes)}}]}
        letters = store.dead_letters.collection.count_documents(query)
    return {
        "dead_letters": letters,
        "snapshots": sum(each is not None and each.replace(tzinfo=None) >= since for each in given),
    }


def _passed_from(store: Store, images: Sequence[Image], to: Timestamp, watermark: Timestamp | None) -> Timestamp | None:
    """Return the time of the first skipped change. The watermark may be after stored changes."""
    times = [watermark]
    for image in images:
        times += [time_of_token(image.head["resumeToken"], None)] if image.head is not None else []
        if image.stored is not None:
            with pymongo.timeout(_READ_SECONDS):
                first = store.backlog.first(image.id, _find_own_place(image), place_at_time(to))
            times += [time_of_token({"_data": first}, None)] if first is not None else []
    return min((time for time in times if time is not None), default=None)


# -- for people ------------------------------------------------------------------------------------


def _describe_move(found: Mapping[str, Any], act: Act) -> list[str]:
    """Return the lines about a reset's effect, and other facts for the decision."""
    forward, partitions, reread = found["forward"], found["partitions"], found["reread"]
    start = moment(found["passed_from"] or found["from"])
    lines = [f"{found['handler']} goes {'forward' if forward else 'back'} to {moment(found['to'])}, from {start}"]
    if partitions or not reread:
        stay = f". {found['staying']} others do not move" if found["staying"] else ""
        moved = list_some([each["partition"] for each in partitions], _NAMED) or "none"
        lines.append(f"  {number(len(partitions), 'partition', 'partitions')}: {moved}{stay}")
    if reread:
        others = number(len(reread), "partition is", "partitions are")
        lines.append(f"  {others} read again: {list_some(reread, _NAMED)}. They run only changes not handled yet")
    then = "is skipped" if forward else "is handled again"
    blocked = f"its change {then}"
    ends = {**dict.fromkeys(("halted", "retrying", "waiting"), blocked), "running": _RUNNING, "paused": _PAUSED}
    for each in [each for each in partitions if each["state"] in ends][:_NAMED]:
        at = f" at {each['key']}" if each["key"] else ""
        lines.append(f"  {each['partition']} is {each['state']}{at}: {ends[each['state']]}")
    if found["key"] is not None:
        lines.append(f"  the reset includes all keys in the same partition as {found['key']}")
    if forward:
        if stored := sum(each["stored"] for each in partitions):
            lines.append(f"  up to {number(stored, 'stored change', 'stored changes')} will never be handled")
        lines.append("  changes since then that are not handled yet are skipped. A reset to that time runs them later")
    return [*lines, *_describe_after(found, act)]


def _describe_after(found: Mapping[str, Any], act: Act) -> list[str]:
    """Return the lines about later data that does not run again, and about the leader."""
    lines = []
    if found["dead_letters"]:
        letters = number(found["dead_letters"], "dead letter", "dead letters")
        lines.append(f"  {letters} of later changes stay. If such a change succeeds now, discard its dead letter")
    if found["snapshots"]:
        again = act.line.changes("snapshot", "start", found["handler"])
        lines.append(
            "  later snapshot rows are not read again. If the handler has operations, fields or match, its target may "
            f"keep older states. Then run `{again}` afterwards"
        )
    if found["leader"] is not None:
        lines.append(f"  a listener is running ({found['leader']}): stop all listeners first")
    return lines
