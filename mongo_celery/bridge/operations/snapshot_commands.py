"""
An operator's snapshots: existing documents for a handler that is led already, asked for, stopped and resumed.

What cannot be is refused in one sentence before anything is stored: a collection that is not there or can have none,
one that the handler does not watch, a condition that the server cannot judge.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from bson import Timestamp, json_util
from pymongo.errors import OperationFailure

from mongo_celery.arguments import is_number
from mongo_celery.bridge.listener.chunks import CollectionFacts, build_shape, estimate, find_collections, read_facts
from mongo_celery.bridge.operations.acts import Act, reached, refuse_unknown
from mongo_celery.bridge.operations.snapshot_progress import Surroundings, named, progress_of, short_names, surroundings
from mongo_celery.bridge.state.snapshots import FAILED, GONE, RUNNING, STOPPED, Snapshot
from mongo_celery.bridge.state.subscriptions import layouts_in_force
from mongo_celery.bridge.stream.filter import find_objection
from mongo_celery.bridge.stream.source import parse_source
from mongo_celery.errors import CommandRefusedError
from mongo_celery.mongo.opening import with_majority
from mongo_celery.mongo.verdicts import Verdict, brief, judge_error
from mongo_celery.plan import Plan, PlanResult

if TYPE_CHECKING:
    from mongo_celery.bridge.handlers import Handler
    from mongo_celery.bridge.wiring import Wiring


def plan_start(act: Act, handler: str | None, *, sources: Sequence[str], match: str | None, rate: float | None) -> Plan:
    """Plan to give a handler the documents that exist; see `Operations.start_snapshot`."""
    if rate is not None and not (is_number(rate) and rate > 0):
        raise CommandRefusedError(f"rate={rate!r} must be a number of documents a second.")
    wiring = act.wiring
    with reached(wiring):
        chosen = _handler(wiring, handler)
        condition = _condition(match)
        found = _facts(wiring, chosen, sources)
        for source in found:
            if condition is not None:
                _judge(wiring, source, condition)
        _refuse_running(act, chosen, found)
        planned: list[dict[str, Any]] = [
            {"id": None, "handler": chosen.name, "source": each, "estimated": estimate(wiring.client, each)}
            for each in found
        ]

    def run(running: Act) -> PlanResult:
        _refuse_running(act, chosen, found)
        store, started = wiring.store.snapshots, []
        for each in planned:
            started.append({**each, "id": store.make_id(chosen.name)})
            store.insert([_record(started[-1], found[each["source"]], condition, rate, running.by)])
            running.count("snapshots", chosen.name)
        store.remove_ended(chosen.name)
        return PlanResult(
            lines=[*map(_line, started), "They come when a listener leads. `status --watch` shows their progress."],
            fields={"snapshots": started},
        )

    return Plan(
        command=act.command,
        lines=[*map(_line, planned)],
        fields={"bridge": wiring.name, "snapshots": planned},
        question="Start it?" if len(planned) == 1 else "Start them?",
        act=partial(act.run, run),
    )


def _line(each: Mapping[str, Any]) -> str:
    count = "an unknown number of" if each["estimated"] is None else f"about {each['estimated']}"
    name = f"{each['id'].rpartition('/')[2]}  " if each["id"] is not None else ""
    return f"{name}{each['source']} for {each['handler']}: {count} documents"


def plan_stop(act: Act, snapshot_id: str) -> Plan:
    """Plan that a snapshot reads no more; see `Operations.stop_snapshot`."""
    after = "What was delivered stays. What is in flight is delivered, unless its listener ends before."
    return _plan_change(act, snapshot_id, "stopped", [RUNNING, FAILED, GONE], act.wiring.store.snapshots.stop, after)


def plan_resume(act: Act, snapshot_id: str) -> Plan:
    """Plan that a snapshot continues; see `Operations.resume_snapshot`."""
    after = "It continues when a listener leads."
    return _plan_change(act, snapshot_id, "resumed", [STOPPED, FAILED], act.wiring.store.snapshots.resume, after)


def _plan_change(
    act: Act, snapshot_id: str, done: str, states: Sequence[str], write: Callable[[str], bool], after: str
) -> Plan:
    wiring = act.wiring
    with reached(wiring):
        found = _one(wiring, snapshot_id)
        progress = progress_of(found, _around(wiring))
    refusal = f"Snapshot {found.id} is {found.state}, so it cannot be {done}."
    if found.state not in states:
        raise CommandRefusedError(refusal)

    def run(running: Act) -> PlanResult:
        if not write(found.id):
            raise CommandRefusedError(refusal)
        running.count("snapshots", found.subscription)
        now = progress_of(_one(wiring, found.id), _around(wiring))
        return PlanResult(lines=[f"{name}: {done}. {after}"], fields={"snapshots": [now]})

    name = f"{found.source} for {found.subscription}"
    return Plan(
        command=act.command,
        lines=[f"{name}: would be {done}"],
        fields={"bridge": wiring.name, "snapshots": [progress]},
        act=partial(act.run, run),
    )


def list_snapshots(wiring: Wiring, name: str | None = None) -> list[dict[str, Any]]:
    """How far all snapshots are that are kept, or those of one handler, as `status` shows them."""
    with reached(wiring):
        around = _around(wiring)
        found = wiring.store.snapshots.read()
    return [progress_of(each, around) for each in found if name in (None, each.subscription)]


# -- inside ----------------------------------------------------------------------------------------


def _around(wiring: Wiring) -> Surroundings:
    store = wiring.store
    lease, subscriptions = store.leases.read(), store.subscriptions.read_all()
    layouts = layouts_in_force(subscriptions)
    images = store.partitions.of({name: layout.term for name, layout in layouts.items()})
    return surroundings(lease, [handler.name for handler in wiring.handlers], subscriptions, images, wiring.line)


def _handler(wiring: Wiring, name: str | None) -> Handler:
    handlers = {each.name: each for each in wiring.handlers}
    names = ", ".join(handlers)
    if name is None:
        taking = [each for each in handlers.values() if each.filter.takes_documents]
        if len(taking) != 1:
            raise CommandRefusedError(f"Name the handler: one of {names or 'none, for this app has none'}.")
        return taking[0]
    if name not in handlers:
        raise refuse_unknown(wiring, name, handlers)
    if not handlers[name].filter.takes_documents:
        raise CommandRefusedError(
            f"Handler {name} asks for none of insert, update and replace, so that documents are nothing to it."
        )
    return handlers[name]


def _condition(text: str | None) -> str | None:
    if text is None:
        return None
    try:
        found = json_util.loads(text)
    except Exception:  # noqa: BLE001 - whatever a parser makes of it
        found = None
    objection = find_objection(found)
    if objection is not None:
        raise CommandRefusedError(f"--match {text} {objection}")
    return json_util.dumps(found, json_options=json_util.CANONICAL_JSON_OPTIONS)


def _facts(wiring: Wiring, handler: Handler, given: Sequence[str]) -> dict[str, CollectionFacts | None]:
    """What each collection is; None where nobody may say."""
    watched = handler.selector(wiring.default_database).sources
    if given:
        chosen = [parse_source(each, wiring.default_database) for each in given]
        for each in chosen:
            if each.collection is None or not any(one.covers(each.database, each.collection) for one in watched):
                raise CommandRefusedError(
                    f"Handler {handler.name} does not watch {each} as a collection: it watches "
                    f"{', '.join(map(str, watched))}."
                )
        sources = [str(each) for each in chosen]
    else:
        sources = sorted({each for source in watched for each in find_collections(wiring, source)})
    found = {source: _fact(wiring, source) for source in dict.fromkeys(sources)}
    if not found:
        raise CommandRefusedError(
            f"Nothing that handler {handler.name} watches is there: there is no document to read."
        )
    return found


def _fact(wiring: Wiring, source: str) -> CollectionFacts | None:
    try:
        facts = read_facts(wiring.client, source)
    except OperationFailure as error:
        if judge_error(error) is Verdict.ACCESS:  # the listener finds out
            return None
        raise
    if facts is None:
        raise CommandRefusedError(f"There is no collection {source}: there is no document to read.")
    if facts.objection is not None:
        raise CommandRefusedError(f"There can be no snapshot of {source}: {facts.objection}.")
    return facts


def _judge(wiring: Wiring, source: str, condition: str) -> None:
    """The server judges a condition on one document: what it cannot read at all would fail on each of them."""
    database, _, name = source.partition(".")
    shape = build_shape(source, Timestamp(1, 1), [json_util.loads(condition)])
    try:
        list(with_majority(wiring.client[database][name]).aggregate([{"$limit": 1}, *shape]))
    except OperationFailure as error:
        if judge_error(error) is Verdict.ACCESS:
            return
        raise CommandRefusedError(f"The server cannot judge --match on {source}: {brief(error)}.") from error


def _refuse_running(act: Act, handler: Handler, found: Mapping[str, object]) -> None:
    known = act.wiring.store.snapshots.read()
    for each in known:
        if each.state == RUNNING and each.subscription == handler.name and each.source in found:
            name = short_names(one.id for one in known)[each.id]
            raise CommandRefusedError(
                f"A snapshot of {each.source} for {handler.name} runs already: wait for it, or stop it with "
                f"`{act.line.changes('snapshot', 'stop', name)}`."
            )


def _record(
    planned: Mapping[str, Any], facts: CollectionFacts | None, condition: str | None, rate: float | None, by: str
) -> dict[str, Any]:
    known = {"uuid": facts.uuid} if facts is not None else {}
    record = {"_id": planned["id"], "source": planned["source"], "estimated": planned["estimated"]}
    return {**record, "match": condition, "rate": rate, "by": by, **known}


def _one(wiring: Wiring, snapshot_id: str) -> Snapshot:
    """By its whole `_id`, by the handler and its end, or by its end where no other has that."""
    known = wiring.store.snapshots.read()
    found = [each for each in known if named(each.id, snapshot_id)]
    if not found:
        raise CommandRefusedError(
            f"Bridge {wiring.name} has no snapshot {snapshot_id!r}; see `{wiring.line.changes('snapshot', 'list')}`."
        )
    if len(found) > 1:
        names = short_names(each.id for each in known)
        raise CommandRefusedError(
            f"Several snapshots of bridge {wiring.name} are named {snapshot_id}: give one of "
            f"{', '.join(sorted(names[each.id] for each in found))}."
        )
    return found[0]
