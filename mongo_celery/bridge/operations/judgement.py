"""
The judgement of a bridge: from its snapshot to findings with severity, effect and helpful commands.

*Failing* means blocked until a person acts, or about to be lost: alert someone. *Degraded* means that it ends
automatically, was requested, or can wait until the morning. Every threshold is here, except those that the listener
also uses, in its log and signals.

Each rule is a function from the snapshot, or one of its handlers, to findings. Only sentences contain foreign text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import groupby

from mongo_celery.bridge.identity import ways_out
from mongo_celery.bridge.listener.blocked import LAG_SECONDS, RETRYING_SECONDS
from mongo_celery.bridge.listener.horizon import SERIOUS as OPLOG_SERIOUS
from mongo_celery.bridge.listener.horizon import THRESHOLDS
from mongo_celery.bridge.operations.bridge_snapshot import NOT_STARTED, BridgeSnapshot, HandlerStatus, PartitionStatus
from mongo_celery.bridge.state.claims import owner_pid
from mongo_celery.bridge.state.leases import FOREIGN, FORGED, MALFORMED, TAMPERED
from mongo_celery.command_line import ANY_APP, CommandLine
from mongo_celery.findings import NAMED, NEAR, SERIOUS, Finding, degraded, failing, list_some, shorten
from mongo_celery.quantities import duration, moment, number, size

UNLED_SECONDS = 30
"""Longest time of a deploy or a take-over after a crash. Then a bridge without a listener is failing."""

UNREAD_SECONDS = 30
"""Longest time of an election. Then an unread stream is failing."""

RUNNING_LONG_SECONDS = 60
"""A call without a time limit that takes longer may never return."""

REPARTITIONING_SECONDS = 300
"""New partitions wait for blocked or running work. After this time a person must check."""

CODES = (
    "state_unreadable",
    "no_listener",
    "handlers",
    "history_lost",
    "stopped",
    "history_at_risk",
    "broker",
    "identity",
    "backlog_missing",
    "backlog_refused",
    "backlog_bound",
    "broker_down",
    "no_worker",
    "consumers",
    "unclaimed",
    "worker_tasks",
    "sent_again",
    "reading_waits",
    "match_refused",
    "halted",
    "broker_rejects",
    "not_stored",
    "snapshot_failed",
    "never_started",
    "waiting",
    "running_long",
    "lag",
    "fed_back",
    "locked",
    "repartitioning",
    "definitions",
    "retrying",
    "paused",
    "dead_letters",
    "foreign_bridge",
    "dropped_messages",
    "unregistered",
)
"""
Codes of findings about a bridge's state. docs/operations/runbook.md explains each.

Worst first: codes that affect all handlers, then one handler, then a change.
"""

_FOR_ALL = {"halted": "retry", "waiting": "retry", "retrying": "retry", "paused": "resume"}
"""Commands that help all handlers, by code."""

_LIMITED = "Changes wait for max_running or rate. If possible, raise this limit."

NO_HANDLERS = (
    "This app has no handler for the bridge. Import the module with the @bridge.on_change functions, for example with "
    "include=[...] of the Celery app."
)


def judge(
    snapshot: BridgeSnapshot, line: CommandLine = ANY_APP, asked: Sequence[Finding] | None = None
) -> BridgeSnapshot:
    """
    Return a snapshot with its findings. This function is pure.

    Args:
        line: the beginning of commands in findings.
        asked: findings about broker and workers, if queried.
    """
    found = [finding for rule in _RULES for finding in rule(snapshot, line)]
    found += [finding for each in _list_served(snapshot) for finding in _judge_handler(each, snapshot, line)]
    judged = {each.code for each in found} | {"no_worker"}
    found += [each for each in asked or () if each.code in CODES and each.code not in judged and each.severity != "ok"]
    return replace(snapshot, findings=tuple(_rank(found, line)), note=_describe_unasked(line, asked))


def _rank(found: Iterable[Finding], line: CommandLine) -> Iterator[Finding]:
    """Yield the worst first. Of one kind, yield the first few, and one for all others."""
    ranked = sorted(found, key=lambda each: (each.severity != "failing", CODES.index(each.code)))
    for (code, severity), group in groupby(ranked, key=lambda each: (each.code, each.severity)):
        same = [*group]
        yield from same[:NAMED]
        others = len(same) - NAMED
        if others > 0:
            commands = [line.changes(_FOR_ALL[code])] if code in _FOR_ALL else []
            text = f"{others} more {'has' if others == 1 else 'have'} the same problem."
            yield Finding(code, severity, text, (*commands, line.changes("status", "--all")))


def _describe_unasked(line: CommandLine, asked: Sequence[Finding] | None) -> str | None:
    if asked is None:
        command = line.changes("status", "--ask")
        return f"Only MongoDB was asked. To ask the broker and the workers as well, run: {command}"
    silent = next((each for each in asked if each.code == "workers" and each.severity != "ok"), None)
    return None if silent is None else f"Workers were not asked: {shorten(silent.sentence)}."


# -- the listener ----------------------------------------------------------------------------------


def _judge_listener(seen: BridgeSnapshot, line: CommandLine) -> Iterator[Finding]:
    start, effect = line.celery("listener"), "No change is read, and none is handled."
    since = seen.unled_seconds
    if seen.state == "never_started":
        yield degraded("never_started", f"No listener has ever run. {effect} Start one.", start)
    elif seen.state == "no_listener" and since is not None and since < UNLED_SECONDS:
        text = f"No listener has run for {duration(since)}, so no change is read. During a deploy this is normal."
        yield degraded("no_listener", text, start)
    elif seen.state == "no_listener":
        fact = "No listener is running" if since is None else f"No listener has run for {duration(since)}"
        yield failing("no_listener", f"{fact}. {effect} Start one.", start)
    elif seen.state == "history_lost" and any(each.state == "history_lost" for each in seen.handlers):
        text = "No listener is running, because every handler has lost its history. Decide for each handler where it "
        yield failing("no_listener", f"{text}continues, then start a listener.")
    elif seen.state in ("failed", "history_lost"):
        text = f"No listener is running. The last one ended with: {shorten(seen.error)}. {effect} "
        yield failing("no_listener", f"{text}Fix this, then start one.", start)
    elif seen.unread_seconds:
        why = shorten(seen.reading_waits or "the server has not answered")
        text = f"The listener has read nothing for {duration(seen.unread_seconds)}: {why}. Every handler waits."
        yield (failing if seen.unread_seconds >= UNREAD_SECONDS else degraded)("reading_waits", text)
    if seen.locked:
        text = (
            f"Open transactions lock the partitions {list_some(seen.locked)}, so their changes wait. Nothing needs to "
        )
        yield degraded("locked", f"{text}be done: the server ends such transactions, by default within a minute.")


def _judge_definitions(seen: BridgeSnapshot, line: CommandLine) -> Iterator[Finding]:
    leader = seen.leader
    process = "no listener is running" if leader is None else f"leader: process {leader.pid} on {leader.host}"
    if seen.difference:
        text = f"Another app or environment uses this bridge: {shorten(seen.difference)} ({process}). This app's "
        # No command: typed without a decision it would take the bridge of another environment.
        yield failing("identity", f"{text}changes are not handled. {ways_out(line)}")
    elif leader is not None:
        lacking = sorted({each.name for each in _list_served(seen)} - set(leader.handlers))
        found = [f"does not have {list_some(lacking)}, so these changes are not handled"] if lacking else []
        found += [f"has another definition of {list_some(leader.changed)}"] if leader.changed else []
        if leader.partitions not in (None, seen.partitions):
            found.append(f"has {leader.partitions} partitions where this app has {seen.partitions}")
        if found:
            text = (
                f"The listener ({process}) runs other code than this app: it {', and '.join(found)}. During a deploy "
            )
            text += "nothing needs to be done. Otherwise stop it, and start a listener with this app's code."
            yield degraded("definitions", text, line.celery("listener"))


# -- workers and the broker ------------------------------------------------------------------------


def _judge_progress(seen: BridgeSnapshot, line: CommandLine) -> Iterator[Finding]:
    """Judge workers, then calls that do not end, then unexplained lag."""
    idle = [*_judge_workers(seen, line)]
    yield from idle
    if seen.sent_again and not idle:
        text = f"A worker takes messages of {list_some(seen.sent_again)}, but does not run them, so the listener sends "
        text += "them again and changes are late. The worker cannot use MongoDB, or runs other code. "
        text += "Search the workers' logs for envelope_unverified and claim_failed."
        yield degraded("sent_again", text, line.changes("check"))
    hanging = [*_judge_long_calls(seen)]
    yield from hanging
    if (
        idle or seen.state != "leading"
    ):  # if no worker or listener works, everything is late: report one cause and one command
        return
    lags = {each.name: _lag_of_flowing(each) for each in _list_served(seen) if each.is_given_changes}
    late = sorted((name for name, lag in lags.items() if lag >= LAG_SECONDS), key=lambda name: -lags[name])
    if late:
        are, fix = "is" if len(late) == 1 else "are", "Add workers, make the handler faster, or set run_size."
        commands = [line.celery("worker")]
        if hanging:
            fix, commands = "First end the handler calls that have run too long.", []
        elif all(each.limited for each in seen.handlers if each.name in late):
            fix, commands = f"{_LIMITED} Otherwise make the handler faster.", []
        text = f"{list_some(late)} {are} late: the oldest change has waited for {duration(lags[late[0]])}."
        yield degraded("lag", f"{text} {fix}", *commands)


def _judge_workers(seen: BridgeSnapshot, line: CommandLine) -> Iterator[Finding]:
    """Judge whether workers take messages, from their answers if queried, otherwise from unfinished runs."""
    untaken, start = seen.untaken, line.celery("worker")
    queues = list_some(untaken.queues) if untaken else ""
    if untaken and untaken.unclaimed:
        text = f"Workers took messages from {queues}, but ran none of them. Changes there wait. "
        text += "These workers cannot use MongoDB, or run other code without the task. "
        text += "Search their logs for envelope_unverified, claim_failed and unregistered tasks."
        yield failing("unclaimed", text, line.changes("check"))
    elif seen.workers is not None and seen.workers.answered:
        return
    elif untaken and untaken.answered and seen.workers is None:
        text = f"No worker consumes the queues {queues}. Changes there wait. Start a worker."
        yield failing("consumers", text, start)
    elif any(each.is_running for handler in seen.handlers for each in handler.partitions):
        return  # a busy solo pool does not answer
    elif seen.workers is None and untaken and untaken.answered is None:
        text = f"No worker takes messages from {queues}, so changes there wait. Start a worker."
        yield degraded("no_worker", text, start)
    elif (seen.workers or untaken) and seen.in_flight:
        waits = number(seen.in_flight, "run of changes waits", "runs of changes wait")
        yield failing("no_worker", f"No worker answers, and {waits}. Start a worker.", start)
    elif seen.workers or untaken:
        yield degraded("no_worker", "No worker answers. The next change will wait. Start a worker.", start)


def _judge_long_calls(seen: BridgeSnapshot) -> Iterator[Finding]:
    """Find calls without a time limit that have run for a minute, and may never return."""
    held = []
    for handler in _list_served(seen):
        claimed = [(each, each.claim) for each in handler.partitions if each.claim is not None and each.claim.live]
        long = [each for each in claimed if (each[1].seconds or 0) >= RUNNING_LONG_SECONDS and each[0].handled is None]
        if long and handler.time_limit is None:
            held.append((handler, long))
    slots = seen.workers.slots if seen.workers is not None else None
    calls = sum(len(long) for _, long in held)
    holds_all = calls >= slots if slots is not None else _is_all_that_runs(seen, {each.name for each, _ in held}, calls)
    cost = "Every slot of the workers is taken, so no other change runs." if holds_all else "Later changes wait."
    cost = "No other change runs." if holds_all and slots is None else cost
    for handler, long in held:
        claims = [claim for _, claim in long]
        pids = dict.fromkeys(pid for each in claims if (pid := owner_pid(each.owner)) is not None)
        end = f"run on that host: kill -9 {' '.join(pids)}" if pids else "end these processes"
        where = _where(handler, [partition for partition, _ in long])
        processes = list_some([*dict.fromkeys(each.process for each in claims)])
        has, seconds = "has" if len(long) == 1 else "have", max(each.seconds or 0 for each in claims)
        text = f"{where} {has} run for {duration(seconds)} in {processes}, without a time limit. "
        text += f"{cost} If the handler hangs, {end}. Then set its time_limit."
        yield (failing if holds_all else degraded)("running_long", text)


def _is_all_that_runs(seen: BridgeSnapshot, handlers: Collection[str], calls: int) -> bool:
    """Return True if only these calls are running, and another handler waits: no slot is free."""
    if seen.per_second != 0 or (seen.in_flight or 0) <= calls:
        return False
    others = [each for each in _list_served(seen) if each.name not in handlers]
    return any(_lag_of_flowing(each) >= RUNNING_LONG_SECONDS for each in others)


def _lag_of_flowing(handler: HandlerStatus) -> int:
    """Return the age of a handler's oldest unblocked change, as far as known, without the longest wanted delay."""
    ages = [each.oldest_seconds or 0 for each in handler.partitions if not each.is_blocked]
    if not any(each.is_blocked for each in handler.partitions):
        ages.append(handler.lag_seconds or 0)
    return max(max(ages, default=0) - math.ceil(handler.delay_seconds), 0)


def _judge_broker(seen: BridgeSnapshot, _line: CommandLine) -> Iterator[Finding]:
    if seen.broker_down:
        text = (
            "The listener cannot send messages: the broker does not answer, or its memory or disk is full. No change "
        )
        text += "reaches a worker, and none is lost. Restore the broker. "
        yield failing("broker_down", f"{text}The listener logs the error (`could not send messages`).")
    if seen.undeliverable:
        first, others = seen.undeliverable[0], seen.undeliverable_count - 1
        more, waits = (f", and {others} more", "Their partitions wait") if others else ("", "Its partition waits")
        text = f"The broker has rejected the message of {shorten(first.key)} ({size(first.bytes)}){more} since "
        text += f"{moment(first.since)}: {shorten(first.error)}. {waits}. Raise the broker's limit on the size of a "
        text += "message, or lower max_message_bytes."
        yield failing("broker_rejects", text)
    if seen.not_stored:
        one, rest = seen.not_stored[0], seen.not_stored_count - 1
        more = f", and of {number(rest, 'more partition', 'more partitions')}" if rest else ""
        text = f"Since {moment(one.since)}, MongoDB has not stored changes of {one.partition}{more}: "
        text += f"{shorten(one.error)}. These changes wait in the listener's memory. Make room on MongoDB's disk, or "
        text += "grant the listener's user readWrite on the collection backlog of the state database."
        yield failing("not_stored", text)


# -- handlers --------------------------------------------------------------------------------------


def _judge_handler(handler: HandlerStatus, seen: BridgeSnapshot, line: CommandLine) -> Iterator[Finding]:
    name = handler.name
    if handler.state == "match_refused":
        text = f"{name} gets no changes, because MongoDB refuses its match: {shorten(handler.error)}. "
        text += "Its position is kept, so nothing is lost yet. Correct match=, and restart the listener with this code."
        yield failing("match_refused", text)
    if handler.state == "stopped":
        yield failing("stopped", f"{name} is stopped: {handler.error}")
    if (fed := handler.feedback) is not None:
        text = f"Since {moment(fed.since)}, {name} got {fed.count} changes of {shorten(fed.key)} in a row, each "
        text += "written while it handled the previous one. If the handler writes to its own source, it triggers "
        yield degraded("fed_back", f"{text}itself forever. Then let it watch only other fields, with fields=.")
    if (lost := handler.lost) is not None:
        text = f"{name} is stopped: the oplog begins at {moment(lost.oldest)}, after the handler's position. Let it "
        text += "continue at the oldest entry of the oplog, or now. Repair the effects of the skipped changes manually."
        resets = (line.changes("reset", name, "--to", place) for place in ("oldest", "now"))
        yield failing("history_lost", text, *resets)
    elif handler.oplog_share is not None and handler.oplog_share >= THRESHOLDS[0]:
        yield _judge_oplog_share(handler, handler.oplog_share, seen, line)
    yield from _judge_blocked(handler, line)
    if bare := [each for each in handler.partitions if each.stored is not None and each.stored.missing]:
        command = _give_up_stored(seen.bridge, handler.name, bare)
        text = f"{_where(handler, bare)} {_are(bare)} blocked: stored changes are missing from the collection backlog "
        text += "of the state database. Restore them from a backup. Without one they are lost. Then stop all "
        text += f"listeners, run `{command}` in that database, and start a listener. Repair the effects of the lost "
        text += "changes manually."
        yield failing("backlog_missing", text)
    new = handler.repartitioning
    if new is not None and handler.state != "stopped" and _seconds(new.since, seen.at) >= REPARTITIONING_SECONDS:
        text = f"{name} has waited for its {new.partitions} new partitions since {moment(new.since)}: "
        text += f"{shorten(new.waits)}. "
        yield degraded("repartitioning", f"{text}Until then it uses the old ones.")


def _give_up_stored(bridge: str, handler: str, partitions: Sequence[PartitionStatus]) -> str:
    """Return the command of mongosh after which partitions no longer wait for stored changes."""
    of = json.dumps(
        {"bridge": bridge, "handler": handler, "partition": {"$in": [each.partition for each in partitions]}}
    )
    return f"db.partitions.updateMany({of}, {{$unset: {{stored: 1}}}})"


def _judge_oplog_share(handler: HandlerStatus, share: float, seen: BridgeSnapshot, line: CommandLine) -> Finding:
    halted, paused = handler.list_partitions("halted"), handler.list_partitions("paused")
    fix, commands = "Enlarge the oplog with replSetResizeOplog, or add workers.", []
    if seen.state != "leading":
        fix, commands = "Start a listener.", [line.celery("listener")]
    elif not handler.is_given_changes:
        fix = "It gets no changes until you correct its definition."
    elif held := halted or paused:
        fix = f"The cause: {_where(handler, held)} {_are(held)} {held[0].state}."
        commands = [_make_command(line, "retry" if halted else "resume", handler, held)]
    elif handler.limited:
        fix = f"{_LIMITED} Otherwise enlarge the oplog with replSetResizeOplog."
    text = f"{handler.name} is behind by {share:.0%} of the oplog. At 100% it loses changes. {fix}"
    return (failing if share >= OPLOG_SERIOUS else degraded)("history_at_risk", text, *commands)


def _judge_blocked(handler: HandlerStatus, line: CommandLine) -> Iterator[Finding]:
    """Yield one finding for each state of blocked partitions."""

    def commands(partitions: Sequence[PartitionStatus], *verbs: str) -> Iterator[str]:
        """Yield commands: the first verb for all partitions, the other verbs for the first partition."""
        for at, verb in enumerate(verbs):
            yield _make_command(line, verb, handler, partitions[: None if at == 0 else 1])

    halted = handler.list_partitions("halted")
    gone = [each for each in halted if handler.state == "history_lost" and not _is_stored(each)]
    if kept := [each for each in halted if each not in gone]:
        at = f"{'' if len(kept) == 1 else ', the first'} at {_key(kept[0])}"
        text = f"{_where(handler, kept)} {_are(kept)} halted{at}: {shorten(kept[0].error or 'no error is recorded')}. "
        text += "Later changes wait. Fix the cause, then retry. Or look at the change, and move it to the dead letters."
        yield failing("halted", text, *commands(kept, "retry", "show", "skip"))
    if gone:
        text = (
            f"{_where(handler, gone)} {_are(gone)} halted at {_key(gone[0])}. The oplog no longer has this change, so "
        )
        text += "it cannot run again unless it is stored. Repair its effects manually, then skip it."
        yield failing("halted", text, *commands(gone[:1], "skip", "show"))
    if paused := handler.list_partitions("paused"):
        text = f"{_where(handler, paused)} {_are(paused)} paused. No handler starts. "
        yield degraded("paused", f"{text}Changes are stored until you resume.", *commands(paused, "resume"))
    if waiting := sorted(handler.list_partitions("waiting"), key=lambda each: str(each.since)):
        first = waiting[0]
        text = (
            f"{_where(handler, waiting)} {'has' if len(waiting) == 1 else 'have'} waited since {moment(first.since)}, "
        )
        text += f"after {number(first.waits, 'attempt', 'attempts')}: {shorten(first.error)}. Restore that server, or "
        text += (
            "the worker's connection to it. The change then runs within half a minute. To run it immediately, retry."
        )
        yield degraded("waiting", text, *commands(waiting, "retry"))
    late = [each for each in handler.list_partitions("retrying") if each.due_seconds > RETRYING_SECONDS]
    if late := sorted(late, key=lambda each: -each.due_seconds):
        text = f"{_where(handler, late)} {'runs' if len(late) == 1 else 'run'} {_key(late[0])} again in "
        text += (
            f"{duration(late[0].due_seconds)}, as the handler requested. Later changes wait. To run it immediately, "
        )
        text += "retry it."
        yield degraded("retrying", text, *commands(late, "retry", "show"))


def _is_stored(halted: PartitionStatus) -> bool:
    """Return True if the change of a halted partition is stored, so that it can run again."""
    return bool(halted.stored and halted.key_token and halted.key_token <= halted.stored.to)


# -- the state -------------------------------------------------------------------------------------


def _judge_backlog(seen: BridgeSnapshot, line: CommandLine) -> Iterator[Finding]:
    backlog = seen.backlog
    if backlog is None:
        return
    if backlog.waits:
        text = f"Changes of blocked partitions are no longer stored: {shorten(backlog.waits)}."
        yield failing("backlog_refused", text)
    if backlog.share is not None and backlog.share >= NEAR:
        stored = [(handler, each) for handler in seen.handlers for each in handler.partitions if each.stored]
        stored.sort(key=lambda found: -((found[1].stored and found[1].stored.count) or 0))
        largest = list_some([f"{handler.name}/{each.partition} ({each.state})" for handler, each in stored])
        full = "At 100% the listener stops reading for every handler as soon as its memory is full"
        text = f"Stored changes take {backlog.share:.0%} of {size(backlog.limit)} (spill_bytes). {full}. Unblock the "
        text += f"largest: {largest or 'not known'}. Or raise spill_bytes, if the state database has room."
        severe = failing if backlog.share >= SERIOUS else degraded
        yield severe("backlog_bound", text, line.changes("status", "--all"))


def _judge_snapshots(seen: BridgeSnapshot, line: CommandLine) -> Iterator[Finding]:
    for each in seen.last_snapshots:
        if each.state == NOT_STARTED:
            text = f"The snapshot of {each.source} for {each.handler} has not started: {shorten(each.reason)}. Until "
            text += "it starts, no existing document is delivered. Fix the reason. Then the listener starts it."
            yield degraded("snapshot_failed", text, line.changes("check"))
        if each.state in ("failed", "source gone"):
            verb, fix = "stop", "Stop it to remove this finding."
            if each.state == "failed":
                verb, fix = "resume", "Resume it to read the others."
            text = f"The snapshot of {each.source} for {each.handler} has ended after {each.done} documents: "
            text += f"{shorten(each.reason or 'no reason is recorded')}. The others are not delivered. {fix}"
            yield failing(
                "snapshot_failed", text, line.changes("snapshot", verb, each.handler, "--source", each.source)
            )


def _judge_leftovers(seen: BridgeSnapshot, line: CommandLine) -> Iterator[Finding]:
    """Judge dead letters, handlers and messages that need attention."""
    if seen.dead_letters:
        names = [each.name for each in seen.handlers if each.dead_letters]
        text = f"{number(seen.dead_letters, 'dead letter', 'dead letters')} of {list_some(names) or 'this bridge'}. "
        text += f"One change was too large to read: {shorten(seen.oversized)}. " if seen.oversized else ""
        if keys := sum(each.parked_keys for each in seen.handlers):
            text += f"{number(keys, 'key is', 'keys are')} parked: later changes of these keys become dead letters. "
        them = "it" if seen.dead_letters == 1 else "them"
        text += f"Look at {them}, then replay or discard {them}."
        yield degraded("dead_letters", text, line.changes("dead-letters", "list"))
    served = _list_served(seen)
    if not served:
        yield failing("handlers", NO_HANDLERS)
    elif gone := [each for each in seen.handlers if not each.is_registered]:
        halted = sum(len(each.list_partitions("halted")) for each in gone)
        stored = [each.name for each in gone if each.stored != 0]
        first, new = gone[0].name, [each.name for each in served if each.state == "new"]
        text = (
            f"The bridge has positions for {list_some([each.name for each in gone])}, but this app has no such handler"
        )
        text += f" ({number(halted, 'partition', 'partitions')} halted). " if halted else ". "
        text += "Its changes are not handled. "
        text += f"Stored changes of {list_some(stored)} count towards spill_bytes. " if stored else ""
        text += "Import the module with its @bridge.on_change function. If you renamed the function, write "
        text += f"name={first!r} in the decorator{f' of {list_some(new)}' if new else ''} to keep the position. "
        yield degraded("unregistered", f"{text}Or remove the handler.", line.changes("remove", first))
    if FOREIGN in seen.dropped_lately:
        sender = f", the last one by process {seen.foreign_sender}" if seen.foreign_sender else ""
        text = f"Workers have dropped {seen.dropped.get(FOREIGN, 0)} messages of another installation or environment"
        text += (
            f"{sender}. If it has the same bridge name on the same broker, it also takes your messages. Give one of "
        )
        text += "the two another name, Bridge(..., name='...'), or a separate broker database. If the workers' logs "
        text += "name a handler with other databases, deploy the same code and settings to listeners and workers."
        yield degraded("foreign_bridge", text)
    if bad := [reason for reason in (FORGED, TAMPERED, MALFORMED) if reason in seen.dropped_lately]:
        numbers = ", ".join(f"{seen.dropped.get(reason, 0)} {reason}" for reason in bad)
        text = f"Workers have dropped {numbers} messages, the last one within an hour. These messages have changed "
        yield degraded("dropped_messages", f"{text}nothing. Find the program that writes them to the broker.")


_RULES = (
    _judge_progress,
    _judge_listener,
    _judge_definitions,
    _judge_broker,
    _judge_backlog,
    _judge_snapshots,
    _judge_leftovers,
)


# -- words -----------------------------------------------------------------------------------------


def _list_served(seen: BridgeSnapshot) -> list[HandlerStatus]:
    return [each for each in seen.handlers if each.is_registered]


def _where(handler: HandlerStatus, partitions: Sequence[PartitionStatus]) -> str:
    """Return `orders/3`, or several partitions, as the beginning of a sentence."""
    if len(partitions) == 1:
        return f"{handler.name}/{partitions[0].partition}"
    if len(partitions) == len(handler.partitions):
        return f"All {len(partitions)} partitions of {handler.name}"
    return f"Partitions {list_some([each.partition for each in partitions])} of {handler.name}"


def _are(partitions: Sequence[PartitionStatus]) -> str:
    return "is" if len(partitions) == 1 else "are"


def _key(partition: PartitionStatus) -> str:
    return shorten(partition.key or "a change")


def _make_command(line: CommandLine, verb: str, handler: HandlerStatus, partitions: Sequence[PartitionStatus]) -> str:
    return line.on(verb, handler.name, [each.partition for each in partitions])


def _seconds(since: datetime | None, at: datetime | None) -> float:
    return 0.0 if since is None or at is None else (at - since).total_seconds()
