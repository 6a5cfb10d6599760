"""
The judgement of a bridge: from its snapshot to findings with severity, effect and helpful commands.

*Failing* means blocked until a person acts, or about to be lost: alert someone. *Degraded* means that it ends
automatically, was requested, or can wait until the morning. Every threshold is here, except the shares of the oplog and
of `spill_bytes`, which the listener's log also uses.

Each rule is a function from the snapshot, or one of its handlers, to findings. Only sentences contain foreign text.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import groupby

from mongo_celery.bridge.identity import ways_out
from mongo_celery.bridge.listener.horizon import SERIOUS as OPLOG_SERIOUS
from mongo_celery.bridge.listener.horizon import THRESHOLDS
from mongo_celery.bridge.operations.bridge_snapshot import BridgeSnapshot, HandlerStatus, PartitionStatus
from mongo_celery.bridge.state.claims import owner_pid
from mongo_celery.bridge.state.leases import FOREIGN, FORGED, MALFORMED, TAMPERED
from mongo_celery.command_line import ANY_APP, CommandLine
from mongo_celery.findings import NAMED, NEAR, SERIOUS, Finding, degraded, failing, list_some, shorten
from mongo_celery.quantities import duration, moment, number, size

UNLED_SECONDS = 30
"""Longest time of a deploy or a take-over after a crash. Then a bridge without a listener is failing."""

UNREAD_SECONDS = 30
"""Longest time of an election. Then an unread stream is failing."""

LAG_SECONDS = 300
"""Lag from which a handler is late."""

RUNNING_LONG_SECONDS = 60
"""A call without a time limit that takes longer may never return."""

REPARTITIONING_SECONDS = 300
"""New partitions wait for blocked or running work. After this time a person must check."""

RETRYING_SECONDS = 3600
"""Retries of a few minutes are normal. A partition that is blocked for longer is a finding."""

CODES = (
    "state_unreadable",
    "no_listener",
    "handlers",
    "history_lost",
    "stopped",
    "history_at_risk",
    "identity",
    "backlog_missing",
    "backlog_refused",
    "backlog_bound",
    "broker",
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

NO_HANDLERS = (
    "This app has no handler for the bridge. Import the module with the @bridge.on_change functions, for example with "
    "include=[...] of the Celery app."
)


def judge(
    snapshot: BridgeSnapshot, line: CommandLine = ANY_APP, asked: Sequence[Finding] | None = None
) -> BridgeSnapshot:
    """
    Return a snapshot with its findings. Pure.

    Args:
        line: the beginning of commands in findings.
        asked: findings about broker and workers, if queried.
    """
    rules = (_judge_progress, _judge_listener, _judge_definitions, _judge_broker, _judge_backlog, _judge_leftovers)
    found = [finding for rule in rules for finding in rule(snapshot, line)]
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
        return f"The verdict is from MongoDB alone. To ask broker and workers as well, run: {command}"
    silent = next((each for each in asked if each.code == "workers" and each.severity != "ok"), None)
    return None if silent is None else f"Workers were not asked: {shorten(silent.sentence)}."


# -- the listener ----------------------------------------------------------------------------------


def _judge_listener(seen: BridgeSnapshot, line: CommandLine) -> Iterator[Finding]:
    start, effect = line.celery("listener"), "No change is read, and none is handled."
    since = seen.unled_seconds
    if seen.state == "never_started":
        yield degraded("never_started", f"No listener has ever run. {effect} Start one.", start)
    elif seen.state == "no_listener" and since is not None and since < UNLED_SECONDS:
        text = f"No listener for {duration(since)}. Changes are not read, which is normal during a deploy."
        yield degraded("no_listener", text, start)
    elif seen.state == "no_listener":
        fact = "No listener is running" if since is None else f"No listener for {duration(since)}"
        yield failing("no_listener", f"{fact}. {effect} Start one.", start)
    elif seen.state == "history_lost" and any(each.state == "history_lost" for each in seen.handlers):
        text = "No listener is running, since every handler has lost its history. Decide for each, then start one."
        yield failing("no_listener", text)
    elif seen.state in ("failed", "history_lost"):
        text = f"No listener is running. The last one ended with: {shorten(seen.error)}. {effect}"
        yield failing("no_listener", text, start)
    elif seen.unread_seconds:
        why = shorten(seen.reading_waits or "the server has not answered")
        text = f"The listener has read nothing for {duration(seen.unread_seconds)}: {why}. Every handler waits."
        yield (failing if seen.unread_seconds >= UNREAD_SECONDS else degraded)("reading_waits", text)
    if seen.locked:
        text = f"Open transactions lock {list_some(seen.locked)}, so their changes wait. "
        yield degraded("locked", f"{text}The server ends such transactions, by default within a minute.")


def _judge_definitions(seen: BridgeSnapshot, line: CommandLine) -> Iterator[Finding]:
    leader = seen.leader
    process = "no listener is running" if leader is None else f"leader: process {leader.pid} on {leader.host}"
    if seen.difference:
        text = f"This bridge is that of another app or environment: {shorten(seen.difference)} ({process}). Changes of "
        # No command: typed without a decision it would take the bridge of another environment.
        yield failing("identity", f"{text}this app are not handled. {ways_out(line)}")
    elif leader is not None:
        lacking = sorted({each.name for each in _list_served(seen)} - set(leader.handlers))
        found = [f"does not have {list_some(lacking)}, so these changes are not handled"] if lacking else []
        found += [f"has another definition of {list_some(leader.changed)}"] if leader.changed else []
        if leader.partitions not in (None, seen.partitions):
            found.append(f"has {leader.partitions} partitions where this app has {seen.partitions}")
        if found:
            text = f"The listener ({process}) {', and '.join(found)}. A deploy ends it. Else end it, and start yours."
            yield degraded("definitions", text, line.celery("listener"))


# -- workers and the broker ------------------------------------------------------------------------


def _judge_progress(seen: BridgeSnapshot, line: CommandLine) -> Iterator[Finding]:
    """Judge workers, then calls that do not end, then unexplained lag."""
    idle = [*_judge_workers(seen, line)]
    yield from idle
    if seen.sent_again and not idle:
        text = f"A worker takes changes of {list_some(seen.sent_again)} and claims nothing, so they are sent again and "
        text += "come late. It cannot use MongoDB, or runs other code. "
        text += "Look for envelope_unverified and claim_failed in the workers' logs."
        yield degraded("sent_again", text, line.changes("check"))
    hanging = [*_judge_long_calls(seen)]
    yield from hanging
    if idle or seen.state != "leading":  # if nothing works, everything is late: report one cause and one command
        return
    lags = {each.name: _lag_of_flowing(each) for each in _list_served(seen) if each.is_given_changes}
    late = sorted((name for name, lag in lags.items() if lag >= LAG_SECONDS), key=lambda name: -lags[name])
    if late:
        are, fix = "is" if len(late) == 1 else "are", "Add workers, make the handler faster, or set run_size."
        fix = "End the calls that run for long first." if hanging else fix
        text = f"{list_some(late)} {are} {duration(lags[late[0]])} behind: the oldest change has waited that long."
        yield degraded("lag", f"{text} {fix}", *([] if hanging else [line.celery("worker")]))


def _judge_workers(seen: BridgeSnapshot, line: CommandLine) -> Iterator[Finding]:
    """Judge by the workers' answers, if queried, otherwise by their unfinished work."""
    untaken, start = seen.untaken, line.celery("worker")
    queues = list_some(untaken.queues) if untaken else ""
    if untaken and untaken.unclaimed:
        text = f"Workers took messages from {queues}, and claimed nothing. Changes there wait. "
        text += "These workers cannot use MongoDB, or lack the task since they run other code. "
        text += "Look for envelope_unverified, claim_failed and unregistered tasks in their log."
        yield failing("unclaimed", text, line.changes("check"))
    elif seen.workers is not None and seen.workers.answered:
        return
    elif untaken and untaken.answered and seen.workers is None:
        yield failing("consumers", f"No running worker consumes {queues}. Changes there wait. Start a worker.", start)
    elif any(each.is_running for handler in seen.handlers for each in handler.partitions):
        return  # a busy solo pool does not answer
    elif seen.workers is None and untaken and untaken.answered is None:
        text = f"No worker takes from {queues}, and workers cannot be asked. Start a worker."
        yield degraded("no_worker", text, start)
    elif (seen.workers or untaken) and seen.in_flight:
        waits = number(seen.in_flight, "run of changes waits", "runs of changes wait")
        yield failing("no_worker", f"No worker answers, and {waits} for one. Start a worker.", start)
    elif seen.workers or untaken:
        yield degraded("no_worker", "No worker answers. The next change waits for one. Start a worker.", start)


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
    cost = "Every slot of the workers is taken: no other change runs." if holds_all else "Later changes wait."
    cost = "Nothing else runs, and other handlers wait." if holds_all and slots is None else cost
    for handler, long in held:
        claims = [claim for _, claim in long]
        pids = dict.fromkeys(pid for each in claims if (pid := owner_pid(each.owner)) is not None)
        end = f"run there: kill -9 {' '.join(pids)}" if pids else "end these processes"
        where = _where(handler, [partition for partition, _ in long])
        processes = list_some([*dict.fromkeys(each.process for each in claims)])
        has, seconds = "has" if len(long) == 1 else "have", max(each.seconds or 0 for each in claims)
        text = f"{where} {has} run for {duration(seconds)} in {processes}, without a time limit. "
        text += f"{cost} If the handler hangs, {end}. Then give it a time_limit."
        yield (failing if holds_all else degraded)("running_long", text)


def _is_all_that_runs(seen: BridgeSnapshot, handlers: Collection[str], calls: int) -> bool:
    """Return True if only these calls are running, and another handler waits: no slot is free."""
    if seen.per_second != 0 or (seen.in_flight or 0) <= calls:
        return False
    others = [each for each in _list_served(seen) if each.name not in handlers]
    return any(_lag_of_flowing(each) >= RUNNING_LONG_SECONDS for each in others)


def _lag_of_flowing(handler: HandlerStatus) -> int:
    """Return the age of a handler's oldest unblocked change, as far as known."""
    ages = [each.oldest_seconds or 0 for each in handler.partitions if not each.is_blocked]
    if not any(each.is_blocked for each in handler.partitions):
        ages.append(handler.lag_seconds or 0)
    return max(ages, default=0)


def _judge_broker(seen: BridgeSnapshot, _line: CommandLine) -> Iterator[Finding]:
    if seen.broker_down:
        text = "The listener cannot publish: the broker does not answer, or its memory or disk is full. No change "
        text += "reaches a worker. Changes that were read are kept. Restore the broker. "
        yield failing("broker_down", f"{text}The listener's log has its error (publish_failed).")
    if seen.undeliverable:
        first, others = seen.undeliverable[0], seen.undeliverable_count - 1
        more, waits = (f", and {others} more", "Their partitions wait") if others else ("", "Its partition waits")
        text = f"The broker rejects {shorten(first.key)} ({size(first.bytes)}){more} since {moment(first.since)}: "
        text += f"{shorten(first.error)}. {waits}. Raise the broker's limit on a message, or lower max_message_bytes."
        yield failing("broker_rejects", text)
    if seen.not_stored:
        one, rest = seen.not_stored[0], seen.not_stored_count - 1
        more = f", and of {number(rest, 'more partition', 'more partitions')}" if rest else ""
        text = f"MongoDB does not store changes of {one.partition}{more}, since {moment(one.since)}: "
        text += f"{shorten(one.error)}. They wait in the listener's memory. Make room on the disk, or grant the "
        text += "listener's user its rights on the collection backlog of the state database."
        yield failing("not_stored", text)


# -- handlers --------------------------------------------------------------------------------------


def _judge_handler(handler: HandlerStatus, seen: BridgeSnapshot, line: CommandLine) -> Iterator[Finding]:
    name = handler.name
    if handler.state == "match_refused":
        text = f"{name} gets no change, since the server refuses its match: {shorten(handler.error)}. "
        text += "Its position is kept. Correct the match, and start a listener with this code."
        yield failing("match_refused", text)
    if handler.state == "stopped":
        yield failing("stopped", f"{name} is stopped: {handler.error}")
    if (fed := handler.feedback) is not None:
        text = f"{name} was given {fed.count} changes of {shorten(fed.key)} in a row since {moment(fed.since)}, each "
        text += "written while it handled the one before. If it writes to what it watches, it feeds itself. "
        yield degraded("fed_back", f"{text}Then watch only other fields, with fields=.")
    if (lost := handler.lost) is not None:
        text = f"{name} has lost its history before {moment(lost.oldest)}, and is stopped. "
        text += "Continue at the oplog's oldest entry, or now. Repair what lies between manually."
        resets = (line.changes("reset", name, "--to", place) for place in ("oldest", "now"))
        yield failing("history_lost", text, *resets)
    elif handler.oplog_share is not None and handler.oplog_share >= THRESHOLDS[0]:
        yield _judge_oplog_share(handler, handler.oplog_share, seen, line)
    yield from _judge_blocked(handler, line)
    if bare := [each for each in handler.partitions if each.stored is not None and each.stored.missing]:
        text = f"{_where(handler, bare)} {_are(bare)} blocked: stored changes are missing. Somebody has removed "
        text += (
            "documents of the collection backlog, or restored only a part of the state database. Restore them from a "
        )
        text += (
            "backup. Without one they are lost. Then end the listener, remove `stored` from the partition's document "
        )
        text += "($unset), start it again, and repair the documents manually."
        yield failing("backlog_missing", text)
    new = handler.repartitioning
    if new is not None and handler.state != "stopped" and _seconds(new.since, seen.at) >= REPARTITIONING_SECONDS:
        text = f"{name} waits for its {new.partitions} partitions since {moment(new.since)}: {shorten(new.waits)}. "
        yield degraded("repartitioning", f"{text}Until then the old ones serve.")


def _judge_oplog_share(handler: HandlerStatus, share: float, seen: BridgeSnapshot, line: CommandLine) -> Finding:
    halted, paused = handler.list_partitions("halted"), handler.list_partitions("paused")
    fix, commands = "Enlarge the oplog with replSetResizeOplog, or add workers.", []
    if seen.state != "leading":
        fix, commands = "Start a listener.", [line.celery("listener")]
    elif not handler.is_given_changes:
        fix = "It gets no changes until its definition is corrected."
    elif held := halted or paused:
        fix = f"{_where(handler, held)} holds it back."
        commands = [_make_command(line, "retry" if halted else "resume", handler, held)]
    text = f"{handler.name} is {share:.0%} of the oplog behind. At 100% it starts to lose changes. {fix}"
    return (failing if share >= OPLOG_SERIOUS else degraded)("history_at_risk", text, *commands)


def _judge_blocked(handler: HandlerStatus, line: CommandLine) -> Iterator[Finding]:
    """Yield one finding for each state of blocked partitions."""

    def commands(partitions: Sequence[PartitionStatus], *verbs: str) -> Iterator[str]:
        """Return commands: the first verb for all of them, the others for the first one."""
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
        text = f"{_where(handler, gone)} {_are(gone)} halted at {_key(gone[0])}, whose history is lost. "
        text += "Unless its bytes are stored, it cannot run again. Repair its document manually, then skip it."
        yield failing("halted", text, *commands(gone[:1], "skip", "show"))
    if paused := handler.list_partitions("paused"):
        text = f"{_where(handler, paused)} {_are(paused)} paused. No handler starts. "
        yield degraded("paused", f"{text}Changes are stored until you resume.", *commands(paused, "resume"))
    if waiting := sorted(handler.list_partitions("waiting"), key=lambda each: str(each.since)):
        first = waiting[0]
        text = f"{_where(handler, waiting)} {'waits' if len(waiting) == 1 else 'wait'} since {moment(first.since)}, "
        text += f"after {number(first.waits, 'attempt', 'attempts')}: {shorten(first.error)}. Restore that server, or "
        text += "the handler's way to it. Then the change runs within half a minute, or immediately on a retry."
        yield degraded("waiting", text, *commands(waiting, "retry"))
    late = [each for each in handler.list_partitions("retrying") if each.due_seconds > RETRYING_SECONDS]
    if late := sorted(late, key=lambda each: -each.due_seconds):
        text = f"{_where(handler, late)} retries {_key(late[0])} in {duration(late[0].due_seconds)}, as it asked. "
        text += "Later changes wait. To run it immediately, retry it."
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
        full = "At 100% blocked changes wait in the listener's memory, and then reading stops for every handler"
        text = f"Stored changes take {backlog.share:.0%} of {size(backlog.limit)} (spill_bytes). {full}. Free the "
        text += f"largest: {largest or 'not known'}. Or raise spill_bytes, if the state database has room."
        severe = failing if backlog.share >= SERIOUS else degraded
        yield severe("backlog_bound", text, line.changes("status", "--all"))


def _judge_leftovers(seen: BridgeSnapshot, line: CommandLine) -> Iterator[Finding]:
    """Judge snapshots, dead letters, handlers and messages that need attention."""
    for each in seen.last_snapshots:
        if each.state in ("failed", "source gone"):
            verb, fix = "stop", "Stop it to acknowledge that."
            if each.state == "failed":
                verb, fix = "resume", "Resume it: it continues at its place."
            text = f"The snapshot of {each.source} for {each.handler} has ended after {each.done} documents: "
            text += f"{shorten(each.reason or 'no reason is recorded')}. The others are not delivered. {fix}"
            yield failing(
                "snapshot_failed", text, line.changes("snapshot", verb, each.handler, "--source", each.source)
            )
    if seen.dead_letters:
        names = [each.name for each in seen.handlers if each.dead_letters]
        text = f"{number(seen.dead_letters, 'dead letter', 'dead letters')} of {list_some(names) or 'this bridge'}. "
        text += f"One could not be read: {shorten(seen.oversized)}. " if seen.oversized else ""
        if keys := sum(each.parked_keys for each in seen.handlers):
            text += f"{number(keys, 'key is', 'keys are')} parked, and later changes join. "
        yield degraded("dead_letters", f"{text}Look, then replay or discard.", line.changes("dead-letters", "list"))
    served = _list_served(seen)
    if not served:
        yield failing("handlers", NO_HANDLERS)
    elif gone := [each for each in seen.handlers if not each.is_registered]:
        halted = sum(len(each.list_partitions("halted")) for each in gone)
        stored = [each.name for each in gone if each.stored != 0]
        first, new = gone[0].name, [each.name for each in served if each.state == "new"]
        text = f"This app has no handler {list_some([each.name for each in gone])}, of which positions are stored"
        text += f" ({number(halted, 'partition', 'partitions')} halted). " if halted else ". "
        text += "Its changes are not handled. "
        text += f"Stored ones of {list_some(stored)} take room under spill_bytes. " if stored else ""
        text += "Import the module with the @bridge.on_change function. If you renamed "
        text += f"the function, write name={first!r} in the decorator{f' of {list_some(new)}' if new else ''}: it "
        yield degraded("unregistered", f"{text}keeps the position. Or remove it.", line.changes("remove", first))
    if FOREIGN in seen.dropped_lately:
        sender = f", the last one by process {seen.foreign_sender}" if seen.foreign_sender else ""
        text = f"Workers have dropped {seen.dropped.get(FOREIGN, 0)} messages of another installation or environment"
        text += f"{sender}. It may use this bridge name on this broker, and take your messages. Give one of the two "
        text += "another name, Bridge(..., name='...'), or a broker database of its own. If the workers' log names a "
        yield degraded(
            "foreign_bridge", f"{text}handler with other databases, deploy the same code and settings to both."
        )
    if bad := [reason for reason in (FORGED, TAMPERED, MALFORMED) if reason in seen.dropped_lately]:
        numbers = ", ".join(f"{seen.dropped.get(reason, 0)} {reason}" for reason in bad)
        text = f"Workers have dropped {numbers} messages, the last within the hour. Find out who else writes to the "
        yield degraded("dropped_messages", f"{text}broker.")


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
