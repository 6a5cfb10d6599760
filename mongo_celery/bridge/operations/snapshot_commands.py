"""
An operator's snapshots: start, stop and resume the delivery of existing documents to a handler.

Impossible requests are refused in one sentence before anything is stored: a collection that does not exist or cannot
have a snapshot, one that the handler does not watch, an invalid condition. Handler and collection identify a snapshot:
the running one, otherwise the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from bson import Timestamp, json_util
from pymongo.errors import OperationFailure

from mongo_celery.arguments import is_number
from mongo_celery.bridge.listener.chunks import CollectionFacts, build_shape, estimate, find_collections, read_facts
from mongo_celery.bridge.operations.acts import Act, PartResult, Step, reached, refuse_unknown
from mongo_celery.bridge.state.snapshots import FAILED, GONE, RUNNING, STOPPED, Snapshot
from mongo_celery.bridge.stream.filter import find_objection
from mongo_celery.bridge.stream.source import parse_source
from mongo_celery.errors import CommandRefusedError
from mongo_celery.mongo.opening import with_majority
from mongo_celery.mongo.verdicts import Verdict, brief, judge_error
from mongo_celery.plan import Plan

if TYPE_CHECKING:
    from mongo_celery.bridge.handlers import Handler
    from mongo_celery.bridge.wiring import Wiring


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotResult(PartResult):
    """
    The effect of a command on the snapshot of one collection.

    Attributes:
        source: the collection.
        estimated: number of its documents. None if the right is missing.
        state: the state of its snapshot before the command. None if there was none.
    """

    source: str
    estimated: int | None
    state: str | None = None


def plan_start(act: Act, handler: str | None, *, sources: Sequence[str], match: str | None, rate: float | None) -> Plan:
    """Plan to give a handler the existing documents, as in `Operations.start_snapshot`."""
    if rate is not None and not (is_number(rate) and rate > 0):
        raise CommandRefusedError(f"rate={rate!r} must be a number of documents a second above 0, such as 100.")
    wiring = act.wiring
    store = wiring.store.snapshots
    with reached(wiring):
        chosen = _choose_handler(wiring, handler)
        condition = _parse_condition(match)
        found = _read_collections(wiring, chosen, sources)
        for source in found:
            if condition is not None:
                _try_condition(wiring, source, condition)
            if objection := _find_running(act, chosen.name, source):
                raise CommandRefusedError(objection)
        planned = [_make_result(chosen.name, source, estimate(wiring.client, source)) for source in found]

    def start(part: SnapshotResult) -> SnapshotResult:
        if objection := _find_running(act, chosen.name, part.source):
            return replace(part, result="refused", reason=objection)
        facts = found[part.source]
        record = {"_id": store.make_id(chosen.name), "source": part.source, "estimated": part.estimated}
        known = {"uuid": facts.uuid} if facts is not None else {}
        store.insert([{**record, "match": condition, "rate": rate, "by": act.by, **known}])
        store.remove_ended(chosen.name)
        return replace(part, result="done")

    steps: list[Step] = [(each, partial(start, each)) for each in planned]
    question = "Start it?" if len(planned) == 1 else "Start them?"
    after = "The running listener reads the documents. If none is running, start one."
    return _plan_on_snapshots(act, steps, "started", after, question=question)


def plan_stop(act: Act, handler: str, sources: Sequence[str]) -> Plan:
    """Plan to stop snapshots, as in `Operations.stop_snapshot`."""
    after = "Documents that were already read are still delivered, unless the listener ends before."
    write = act.wiring.store.snapshots.stop
    return _plan_change(act, handler, sources, (RUNNING, FAILED, GONE), write, "stopped", after)


def plan_resume(act: Act, handler: str, sources: Sequence[str]) -> Plan:
    """Plan to continue snapshots, as in `Operations.resume_snapshot`."""
    write = act.wiring.store.snapshots.resume

    def question(chosen: Sequence[Snapshot]) -> str | None:
        stopped = [each.source for each in chosen if each.state == STOPPED]
        text = f"Also resume the snapshots that a person has stopped: {', '.join(stopped)}?"
        return text if stopped and not sources else None

    after = "The running listener continues to read the documents. If none is running, start one."
    return _plan_change(act, handler, sources, (STOPPED, FAILED), write, "resumed", after, question)


def _plan_change(
    act: Act,
    handler: str,
    sources: Sequence[str],
    states: Sequence[str],
    write: Callable[[str], bool],
    done: str,
    after: str,
    question: Callable[[Sequence[Snapshot]], str | None] = lambda _: None,
) -> Plan:
    with reached(act.wiring):
        last = _find_last(act.wiring, handler)
    chosen = [each for each in last.values() if each.state in states and (not sources or each.source in sources)]
    if not chosen or any(source not in last for source in sources):
        has = ", ".join(f"{each.source} is {each.state}" for each in last.values())
        raise CommandRefusedError(
            f"Handler {handler} has no matching snapshot that can be {done}. Its snapshots: {has or 'none'}."
        )

    def change(id_: str, part: SnapshotResult) -> SnapshotResult:
        if write(id_):
            return replace(part, result="done")
        reason = f"The snapshot of {part.source} has changed meanwhile, so it was not {done}. Repeat the command."
        return replace(part, result="refused", reason=reason)

    parts = [(each.id, _make_result(handler, each.source, each.estimated, each.state)) for each in chosen]
    steps: list[Step] = [(part, partial(change, id_, part)) for id_, part in parts]
    seen = " ".join(f"{each.id}:{each.state}" for each in chosen)
    return _plan_on_snapshots(act, steps, done, after, seen=seen, question=question(chosen))


def _plan_on_snapshots(
    act: Act,
    steps: Sequence[Step],
    done: str,
    after: str,
    **given: Any,
) -> Plan:
    def describe(parts: Sequence[SnapshotResult]) -> list[str]:
        lines = []
        for each in parts:
            count = "an unknown number of" if each.estimated is None else f"about {each.estimated}"
            word = f"would be {done}" if each.result == "planned" else done
            state = f", {each.state}" if each.state else ""
            if each.result != "refused":
                lines.append(f"{each.source} for {each.handler}, {count} documents{state}: {word}")
        if any(each.result == "done" for each in parts):
            lines.append(f"{after} To see them: {act.line.changes('status', '--watch')}")
        return lines

    return act.plan_parts("snapshots", lambda: steps, describe, **given)


def _make_result(handler: str, source: str, estimated: int | None, state: str | None = None) -> SnapshotResult:
    return SnapshotResult(handler=handler, source=source, estimated=estimated, state=state, result="planned")


def _find_last(wiring: Wiring, handler: str) -> Mapping[str, Snapshot]:
    """Return a handler's snapshot of each collection: the running one, otherwise the last one."""
    known = sorted(wiring.store.snapshots.read(), key=lambda each: each.state == RUNNING)
    names = {each.subscription for each in known} | {each.name for each in wiring.handlers}
    if handler not in names:
        raise refuse_unknown(wiring, handler, names)
    return {each.source: each for each in known if each.subscription == handler}


# -- what can be read ------------------------------------------------------------------------------


def _choose_handler(wiring: Wiring, name: str | None) -> Handler:
    handlers = {each.name: each for each in wiring.handlers}
    names = ", ".join(handlers)
    if name is None:
        taking = [each for each in handlers.values() if each.filter.takes_documents]
        if len(taking) != 1:
            raise CommandRefusedError(f"Name the handler of the snapshot. Handlers: {names or 'none'}.")
        return taking[0]
    if name not in handlers:
        raise refuse_unknown(wiring, name, handlers)
    if not handlers[name].filter.takes_documents:
        raise CommandRefusedError(
            f"Handler {name} cannot get documents: its operations lack insert, update and replace. Add one of them."
        )
    return handlers[name]


def _parse_condition(text: str | None) -> str | None:
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


def _read_collections(wiring: Wiring, handler: Handler, given: Sequence[str]) -> dict[str, CollectionFacts | None]:
    """Return the kind of each collection. None if the right is missing."""
    watched = handler.selector(wiring.default_database).sources
    if given:
        chosen = [parse_source(each, wiring.default_database) for each in given]
        for each in chosen:
            if each.collection is None or not any(one.covers(each.database, each.collection) for one in watched):
                raise CommandRefusedError(
                    f"--source {each} is not a collection that handler {handler.name} watches. It watches "
                    f"{', '.join(map(str, watched))}."
                )
        sources = [str(each) for each in chosen]
    else:
        sources = sorted({each for source in watched for each in find_collections(wiring, source)})
    found = {source: _read_collection(wiring, source) for source in dict.fromkeys(sources)}
    if not found:
        raise CommandRefusedError(
            f"The collections that handler {handler.name} watches do not exist, so there are no documents to read."
        )
    return found


def _read_collection(wiring: Wiring, source: str) -> CollectionFacts | None:
    try:
        facts = read_facts(wiring.client, source)
    except OperationFailure as error:
        if judge_error(error) is Verdict.ACCESS:  # the listener will find out
            return None
        raise
    if facts is None:
        raise CommandRefusedError(f"Collection {source} does not exist, so there are no documents to read.")
    if facts.objection is not None:
        raise CommandRefusedError(f"A snapshot of {source} is not possible: {facts.objection}.")
    return facts


def _try_condition(wiring: Wiring, source: str, condition: str) -> None:
    """Let the server check a condition on one document: an invalid one would fail on each of them."""
    database, _, name = source.partition(".")
    shape = build_shape(source, Timestamp(1, 1), [json_util.loads(condition)])
    try:
        list(with_majority(wiring.client[database][name]).aggregate([{"$limit": 1}, *shape]))
    except OperationFailure as error:
        if judge_error(error) is Verdict.ACCESS:
            return
        raise CommandRefusedError(f"MongoDB refuses --match on {source}: {brief(error)}. Correct it.") from error


def _find_running(act: Act, handler: str, source: str) -> str | None:
    """Return the sentence about a running snapshot of a collection. None if none is running."""
    last = _find_last(act.wiring, handler).get(source)
    if last is None or last.state != RUNNING:
        return None
    stop = act.line.changes("snapshot", "stop", handler, "--source", source)
    return f"A snapshot of {source} for {handler} is already running. Wait for its end, or stop it: `{stop}`"
