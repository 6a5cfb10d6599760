"""
The judgement of a bridge: from its snapshot to findings, each with its severity, its effect and the command that helps.

*Failing* is what is blocked until somebody acts, or is about to be lost: wake somebody. *Degraded* is what ends
automatically, was asked for, or can wait until the morning. Every threshold of the verdict is here, but for the shares
of the oplog and of `spill_bytes`, which the listener's log uses, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import chain

from mongo_celery.bridge.identity import ways_out
from mongo_celery.bridge.listener.horizon import SERIOUS as OPLOG_SERIOUS
from mongo_celery.bridge.listener.horizon import THRESHOLDS
from mongo_celery.bridge.operations.bridge_snapshot import BridgeSnapshot, HandlerStatus, PartitionStatus
from mongo_celery.bridge.state.claims import owner_pid
from mongo_celery.bridge.state.leases import FOREIGN, FORGED, MALFORMED, TAMPERED
from mongo_celery.command_line import ANY_APP, CommandLine
from mongo_celery.findings import NEAR, SERIOUS, Finding, degraded, failing
from mongo_celery.quantities import duration, moment, number, size

UNLED_SECONDS = 30
"""A deploy, or a take-over after a crash, takes no longer: from then on a bridge without a listener is failing."""

UNREAD_SECONDS = 30
"""An election takes no longer: from then on a stream that is not read is failing."""

LAG_SECONDS = 300
"""From then on a handler is late."""

RUNNING_LONG_SECONDS = 60
"""A call without a time limit that takes longer may never return."""

REPARTITIONING_SECONDS = 300
"""New partitions wait for what is blocked, or runs: after so long somebody has to look."""

RETRYING_SECONDS = 3600
"""Retries of a few minutes are everyday; one that blocks a partition for longer is a finding."""

CODES: Mapping[str, str] = {
    "state_unreadable": "listener",
    "no_listener": "listener",
    "handlers": "deployment",
    "history_lost": "history",
    "stopped": "layouts",
    "history_at_risk": "history",
    "identity": "deployment",
    "backlog_missing": "storage",
    "backlog_refused": "storage",
    "backlog_bound": "storage",
    "broker": "broker-and-workers",
    "broker_down": "broker-and-workers",
    "no_worker": "broker-and-workers",
    "consumers": "broker-and-workers",
    "unclaimed": "broker-and-workers",
    "worker_tasks": "broker-and-workers",
    "reading_waits": "listener",
    "match_refused": "listener",
    "halted": "standing",
    "broker_rejects": "broker-and-workers",
    "not_stored": "storage",
    "snapshot_failed": "snapshots",
    "never_started": "listener",
    "waiting": "standing",
    "running_long": "broker-and-workers",
    "lag": "broker-and-workers",
    "fed_back": "standing",
    "locked": "listener",
    "repartitioning": "layouts",
    "definitions": "deployment",
    "partitions": "layouts",
    "retrying": "standing",
    "paused": "standing",
    "dead_letters": "dead-letters",
    "backlog_unserved": "storage",
    "foreign_bridge": "deployment",
    "dropped_messages": "deployment",
    "unregistered": "deployment",
}
"""
Codes of findings about a bridge's state, each with its page in docs/operations.

The worst first: what touches all handlers, then one, then a change.
"""

NAMED = 3
"""Handlers, or partitions, that are named; more are counted."""

NO_HANDLERS = (
    "This app has no handler for the bridge. Import the module with the @bridge.on_change functions, for example with "
    "include=[...] of the Celery app."
)

_TEXT_MAX = 200


def judge(
    snapshot: BridgeSnapshot, line: CommandLine = ANY_APP, asked: Sequence[Finding] | None = None
) -> BridgeSnapshot:
    """
    Return a snapshot with its findings. Pure.

    Args:
        line: beginning of the commands that they print.
        asked: findings about broker and workers, where these were asked.
    """
    found = [*_Judge(snapshot, line, asked or ()).findings()]
    found += [each for each in asked or () if each.code in CODES and each.code != "no_worker" and each.severity != "ok"]
    first = {each.code: each for each in reversed(found) if each.code == "consumers"}  # asked, and by the listener
    ranked = sorted((each for each in found if first.get(each.code, each) is each), key=_rank)
    return replace(snapshot, findings=tuple(ranked), note=_note(line, asked))


def _rank(finding: Finding) -> tuple[bool, int]:
    return finding.severity != "failing", list(CODES).index(finding.code)


def _note(line: CommandLine, asked: Sequence[Finding] | None) -> str | None:
    if asked is None:
        return f"Broker and workers were not asked. To ask them, run: {line.changes('status', '--ask')}"
    silent = next((each for each in asked if each.code == "workers" and each.severity != "ok"), None)
    return None if silent is None else f"Workers were not asked: {cut(silent.sentence)}."


def listed(names: Sequence[str], most: int = NAMED) -> str:
    """Return some names, and how many more."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return unquote(", ".join(names[:most]) + more)


def unquote(text: object) -> str:
    """Return foreign text without backticks: between them a page offers a command."""
    return str(text).replace("`", "'")


def cut(text: object) -> str:
    """Return foreign text on one line, bounded, without its full stop."""
    found = " ".join(unquote(text).split())
    return (f"{found[:_TEXT_MAX]}..." if len(found) > _TEXT_MAX else found).removesuffix(".")


def _where(handler: HandlerStatus, partitions: Sequence[PartitionStatus]) -> str:
    """`orders/3`, or several partitions, as the beginning of a sentence."""
    if len(partitions) == 1:
        return f"{handler.name}/{partitions[0].index}"
    if len(partitions) == len(handler.partitions):
        return f"All {len(partitions)} partitions of {handler.name}"
    return f"Partitions {listed([str(each.index) for each in partitions])} of {handler.name}"


def _are(partitions: Sequence[PartitionStatus]) -> str:
    return "is" if len(partitions) == 1 else "are"


class _Judge:
    """The judgement of one snapshot."""

    def __init__(self, snapshot: BridgeSnapshot, line: CommandLine, asked: Iterable[Finding]) -> None:
        self._snapshot = snapshot
        self._line = line
        self._is_silent = any(each.code == "no_worker" for each in asked)
        self._served = [each for each in snapshot.handlers if each.is_registered]

    def findings(self) -> Iterator[Finding]:
        """Judge every fact once."""
        idle, running = [*self._workers()], [*self._running_long()]
        yield from chain(idle, running)
        if not idle:  # where nobody works everything is late: one cause, and one command
            yield from self._lag(is_hanging=bool(running))
        parts = (self._listener, self._definitions, self._handlers, self._publishing, self._blocked, self._histories)
        for part in (*parts, self._backlog, self._rest, self._dropped):
            yield from part()

    # -- the listener ------------------------------------------------------------------------------

    def _listener(self) -> Iterator[Finding]:
        seen, start = self._snapshot, self._line.celery("listener")
        effect = "No change is read, and none is handled."
        if seen.state == "never_started":
            yield degraded("never_started", f"No listener has ever run. {effect} Start one.", start)
        elif seen.state == "no_listener":
            since = seen.unled_seconds
            fact = "No listener is running" if since is None else f"No listener for {duration(since)}"
            if since is not None and since < UNLED_SECONDS:
                yield degraded("no_listener", f"{fact}. Changes are not read, which is normal during a deploy.", start)
            else:
                yield failing("no_listener", f"{fact}. {effect} Start one.", start)
        elif seen.state == "history_lost" and any(each.state == "history_lost" for each in seen.handlers):
            text = "No listener is running, since every handler has lost its history. Decide for each, then start one."
            yield failing("no_listener", text)
        elif seen.state != "leading":
            text = f"No listener is running. The last one ended with: {cut(seen.error)}. {effect}"
            yield failing("no_listener", text, start)
        elif seen.unread_seconds:
            why = cut(seen.reading_waits or "the server has not answered")
            text = f"The listener has read nothing for {duration(seen.unread_seconds)}: {why}. Every handler waits."
            yield (failing if seen.unread_seconds >= UNREAD_SECONDS else degraded)("reading_waits", text)
        if seen.locked:
            yield degraded(
                "locked",
                f"Open transactions lock {listed(seen.locked)}, so their changes wait. The server ends such "
                "transactions, by default within a minute.",
            )

    def _definitions(self) -> Iterator[Finding]:
        seen, leader = self._snapshot, self._snapshot.leader
        process = f"process {leader.pid} on {unquote(leader.host)}" if leader is not None else None
        if seen.difference:
            text = f"This bridge is that of another app or environment: {cut(seen.difference)}"
            text += f" (leader: {process})" if process else " (no listener is running)"
            out = ways_out(self._line.celery("listener", "--take-over"))
            yield failing("identity", f"{text}. Changes of this app are not handled. {out}")
        elif leader is not None:
            lacking = sorted({each.name for each in self._served} - set(leader.handlers))
            found = [f"does not have {listed(lacking)}, so these changes are not handled"] if lacking else []
            if leader.changed:
                found.append(f"has another definition of {listed(leader.changed)}")
            if found:
                text = f"The listener ({process}) {', and '.join(found)}. A deploy ends it. Else end it, and start"
                yield degraded("definitions", f"{text} this code.", self._line.celery("listener"))
            if leader.partitions not in (None, seen.partitions):
                yield degraded(
                    "partitions",
                    f"The listener spreads changes over {leader.partitions} partitions, this app over "
                    f"{seen.partitions}. Workers with its options alone leave queues without a consumer. Deploy both "
                    "with the same options.",
                )

    # -- workers and the broker --------------------------------------------------------------------

    def _workers(self) -> Iterator[Finding]:
        """Judge by the workers' answers, where they were asked; else by what they leave undone."""
        seen, untaken, start = self._snapshot, self._snapshot.untaken, self._line.celery("worker")
        if untaken and untaken.unclaimed:
            text = (
                f"Workers take messages from {listed(untaken.queues)}, and claim nothing. Changes there wait. Look for "
                "claim_failed in their log, such as a missing right, and run the check as their user."
            )
            yield failing("unclaimed", text, self._line.changes("check"))
            return
        if seen.workers is not None and not self._is_silent:
            return
        if untaken and untaken.answered and not self._is_silent:
            text = f"No running worker consumes {listed(untaken.queues)}. Changes there wait. Start a worker."
            yield failing("consumers", text, start)
            return
        if any(each.is_running for handler in seen.handlers for each in handler.partitions):
            return  # a busy solo pool does not answer
        is_silent = self._is_silent or bool(untaken and untaken.answered is False)
        if is_silent and seen.in_flight:
            waits = number(seen.in_flight, "run of changes waits", "runs of changes wait")
            yield failing("no_worker", f"No worker answers, and {waits} for one. Start a worker.", start)
        elif is_silent:
            yield degraded("no_worker", "No worker answers. The next change waits for one. Start a worker.", start)
        elif untaken:
            text = f"No worker takes from {listed(untaken.queues)}, and workers cannot be asked. Start a worker."
            yield degraded("no_worker", text, start)

    def _publishing(self) -> Iterator[Finding]:
        seen = self._snapshot
        if seen.broker_down:
            yield failing(
                "broker_down",
                "The listener cannot publish: the broker does not answer, or takes nothing. No change reaches a "
                "worker. What is read is kept. Restore the broker.",
            )
        if seen.undeliverable:
            first, others = seen.undeliverable[0], seen.undeliverable_count - 1
            more = f", and {others} more" if others else ""
            yield failing(
                "broker_rejects",
                f"The broker rejects {cut(first.key)} ({size(first.bytes)}){more} since {moment(first.since)}: "
                f"{cut(first.error)}. {'Their partitions wait' if others else 'Its partition waits'}. Raise the "
                "broker's limit on a message, or lower max_message_bytes.",
            )
        if seen.not_stored:
            one, rest = seen.not_stored[0], seen.not_stored_count - 1
            more = f", and of {number(rest, 'more partition', 'more partitions')}" if rest else ""
            yield failing(
                "not_stored",
                f"MongoDB does not store changes of {unquote(one.partition)}{more}, since {moment(one.since)}: "
                f"{cut(one.error)}. They wait in the listener's memory. Grant the listener's user its rights on the "
                "collection backlog of the state database, or make room on the disk.",
            )

    def _running_long(self) -> Iterator[Finding]:
        """Calls without a time limit that have run for a minute: they may never return."""
        held = []
        for handler in self._served:
            long = [
                each
                for each in handler.partitions
                if each.claim is not None and each.claim.live and (each.claim.seconds or 0) >= RUNNING_LONG_SECONDS
            ]
            long = [each for each in long if each.handled is None]
            if long and handler.time_limit is None:
                held.append((handler, long))
        workers = self._snapshot.workers
        slots = 0 if self._is_silent else workers.slots if workers is not None else None
        holds_all = slots is not None and sum(len(long) for _, long in held) >= slots
        cost = "Every slot of the workers is taken: no other change runs." if holds_all else "Later changes wait."
        found = []
        for handler, long in held:
            claims = [each.claim for each in long if each.claim is not None]
            pids = dict.fromkeys(pid for each in claims if (pid := owner_pid(each.owner)) is not None)
            kill = f"run there: kill -9 {' '.join(pids)}" if pids else "end these processes"
            text = (
                f"{_where(handler, long)} has run for {duration(max(each.seconds or 0 for each in claims))} in "
                f"{listed(list(dict.fromkeys(each.process for each in claims)))}, without a time limit. {cost} If the "
                f"handler hangs, {kill}. Then give it a time_limit."
            )
            found.append((failing if holds_all else degraded)("running_long", text))
        yield from self._summed(found, "have calls that run for long", None)

    def _lag(self, *, is_hanging: bool) -> Iterator[Finding]:
        """The lag of each handler, but for what is blocked: that is a finding of its own."""
        if self._snapshot.state != "leading":
            return
        lags = {each.name: _lag_of_flowing(each) for each in self._served if each.is_given_changes}
        late = sorted((name for name, lag in lags.items() if lag >= LAG_SECONDS), key=lambda name: -lags[name])
        if not late:
            return
        gains = [each.run_gain for each in self._served if each.name in late and each.run_gain]
        fix = "End the calls that run for long first." if is_hanging else "Add workers, or make the handler faster."
        text = (
            f"{listed(late)} {'is' if len(late) == 1 else 'are'} {duration(lags[late[0]])} behind: the oldest change "
            f"has waited for so long. {fix}"
        )
        if gains and not is_hanging:
            text += f" {gains[0]}."
        yield degraded("lag", text, None if is_hanging else self._line.celery("worker"))

    # -- handlers ----------------------------------------------------------------------------------

    def _handlers(self) -> Iterator[Finding]:
        if not self._served:
            yield failing("handlers", NO_HANDLERS)
        stopped = []
        for each in self._snapshot.handlers:
            if each.state == "match_refused":
                yield failing(
                    "match_refused",
                    f"{each.name} gets no change, since the server refuses its match: {cut(each.error)}. Its position "
                    "is kept. Correct the match, and start a listener with this code.",
                )
            if each.state == "stopped":
                stopped.append(failing("stopped", f"{each.name} is stopped: {unquote(each.error)}"))
            if each.feedback is not None:
                found = each.feedback
                yield degraded(
                    "fed_back",
                    f"{each.name} was given {found.count} changes of {cut(found.key)} in a row since "
                    f"{moment(found.since)}, each written while it handled the one before. If it writes to what it "
                    "watches, it feeds itself: watch only other fields, with fields=.",
                )
        yield from self._summed(stopped, "are stopped", None)

    def _blocked(self) -> Iterator[Finding]:
        """One finding for each state of each handler with blocked partitions."""
        retried, skipped, paused, waiting, retrying = [], [], [], [], []
        for each in self._served:
            halted = each.list_in("halted")
            gone = [one for one in halted if each.state == "history_lost" and not _is_stored(one)]
            kept = [one for one in halted if one not in gone]
            if kept:
                retried.append(self._halted(each, kept))
            if gone:
                skipped.append(self._lost_halt(each, gone))
            if found := each.list_in("paused"):
                text = f"{_where(each, found)} {_are(found)} paused. No handler starts, and changes are stored until"
                command = self._line.on("resume", each.name, [one.index for one in found])
                paused.append(degraded("paused", f"{text} you resume {'it' if len(found) == 1 else 'them'}.", command))
            if found := each.list_in("waiting"):
                waiting.append(self._waiting(each, found))
            if found := [one for one in each.list_in("retrying") if one.due_seconds > RETRYING_SECONDS]:
                retrying.append(self._retrying(each, found))
        yield from self._summed(retried, "have halted partitions", self._line.changes("retry"))
        yield from self._summed(skipped, "have partitions that halted at changes whose history is lost", None)
        if len(self._served) > 1 and all(
            each.partitions and len(each.list_in("paused")) == len(each.partitions) for each in self._served
        ):
            text = f"All {len(self._served)} handlers are paused. None starts, and changes are stored until you resume"
            yield degraded("paused", f"{text} them.", self._line.changes("resume"))
        else:
            yield from self._summed(paused, "have paused partitions", self._line.changes("resume"))
        yield from self._summed(waiting, "wait for MongoDB or the broker", self._line.changes("retry"))
        yield from self._summed(retrying, "have changes that are retried late", self._line.changes("retry"))

    def _halted(self, handler: HandlerStatus, halted: Sequence[PartitionStatus]) -> Finding:
        first, indexes = halted[0], [each.index for each in halted]
        their, them = ("Its", "it") if len(halted) == 1 else ("Their", "them")
        at = f"{'' if len(halted) == 1 else ', the first'} at {_key(first)}"
        return failing(
            "halted",
            f"{_where(handler, halted)} {_are(halted)} halted{at}: {cut(first.error or 'no error is recorded')}. "
            f"{their} later changes wait. Fix the cause and retry {them}. Or see the change with "
            f"`{self._line.changes('show', handler.name, str(first.index))}` and move it to the dead letters with "
            f"`{self._skip(handler, first)}`.",
            self._line.on("retry", handler.name, indexes),
        )

    def _lost_halt(self, handler: HandlerStatus, halted: Sequence[PartitionStatus]) -> Finding:
        first = halted[0]
        return failing(
            "halted",
            f"{_where(handler, halted)} {_are(halted)} halted at {_key(first)}, whose history is lost. Unless "
            f"`{self._line.changes('show', handler.name, str(first.index))}` has its bytes, it cannot run again. "
            "Repair its document manually, then skip it.",
            self._skip(handler, first),
        )

    def _skip(self, handler: HandlerStatus, partition: PartitionStatus) -> str:
        return self._line.on("skip", handler.name, [partition.index])

    def _waiting(self, handler: HandlerStatus, waiting: Sequence[PartitionStatus]) -> Finding:
        first = min(waiting, key=lambda each: str(each.since))
        wait = "waits" if len(waiting) == 1 else "wait"
        return degraded(
            "waiting",
            f"{_where(handler, waiting)} {wait} since {moment(first.since)}, after "
            f"{number(first.waits, 'attempt', 'attempts')}: {cut(first.error)}. Restore that server, or the handler's "
            "way to it. Then the change runs automatically within half a minute, or immediately on a retry.",
            self._line.on("retry", handler.name, [each.index for each in waiting]),
        )

    def _retrying(self, handler: HandlerStatus, late: Sequence[PartitionStatus]) -> Finding:
        longest = max(late, key=lambda each: each.due_seconds)
        return degraded(
            "retrying",
            f"{_where(handler, late)} retries {_key(longest)} in {duration(longest.due_seconds)}, as the handler "
            "asked. Later changes wait. To run it immediately, retry it. "
            f"`{self._line.changes('show', handler.name, str(longest.index))}` shows the change.",
            self._line.on("retry", handler.name, [each.index for each in late]),
        )

    def _histories(self) -> Iterator[Finding]:
        lost, near = [], []
        for each in self._served:
            if each.lost is not None:
                lost.append(
                    failing(
                        "history_lost",
                        f"{each.name} has lost its history before {moment(each.lost.oldest)}, and is stopped. Continue "
                        "at the oplog's oldest entry, or with "
                        f"`{self._line.changes('reset', each.name, '--to', 'now')}`. Repair what lies between "
                        "manually.",
                        self._line.changes("reset", each.name, "--to", "oldest"),
                    )
                )
            elif each.oplog_share is not None and each.oplog_share >= THRESHOLDS[0]:
                near.append(self._near(each, each.oplog_share))
        yield from self._summed(lost, "have lost their history", None)
        yield from self._summed(sorted(near, key=_rank), "are about to lose their history", None)

    def _near(self, handler: HandlerStatus, share: float) -> Finding:
        halted, paused = handler.list_in("halted"), handler.list_in("paused")
        fix, command = "Enlarge the oplog with replSetResizeOplog, or add workers.", None
        if self._snapshot.state != "leading":
            fix, command = "Start a listener.", self._line.celery("listener")
        elif not handler.is_given_changes:
            fix, command = "It gets no changes until its definition is corrected.", None
        elif halted or paused:
            held, verb = (halted, "retry") if halted else (paused, "resume")
            fix, command = (
                f"{_where(handler, held)} holds it back.",
                self._line.on(verb, handler.name, [each.index for each in held]),
            )
        return (failing if share >= OPLOG_SERIOUS else degraded)(
            "history_at_risk",
            f"{handler.name} is {share:.0%} of the oplog behind. From 100% on, what was not read is lost. {fix}",
            command,
        )

    # -- stored changes ----------------------------------------------------------------------------

    def _backlog(self) -> Iterator[Finding]:
        seen = self._snapshot
        backlog = seen.backlog
        if backlog is None:
            return
        if backlog.waits:
            yield failing(
                "backlog_refused", f"Changes of blocked partitions are no longer stored: {unquote(backlog.waits)}."
            )
        if backlog.share is not None and backlog.share >= NEAR:
            then = "So blocked changes wait in the listener's memory. Once that is full, no handler gets changes"
            if backlog.share < 1:
                then = "At 100% blocked changes wait in the listener's memory, and reading stops for every handler"
            yield (failing if backlog.share >= SERIOUS else degraded)(
                "backlog_bound",
                f"Stored changes take {backlog.share:.0%} of {size(backlog.limit)} (spill_bytes). {then}. Free the "
                f"largest: {self._largest()}. Or raise spill_bytes, if the state database has room.",
            )
        missing = []
        for each in self._served:
            if bare := [one for one in each.partitions if one.stored is not None and one.stored.missing]:
                text = (
                    f"{_where(each, bare)} {_are(bare)} blocked: stored changes are gone. Somebody has removed "
                    "documents of the collection backlog, or restored only a part of the state database. Restore them "
                    "from a backup. Without one they are lost: end the listener, remove `spilled` from the partition's "
                    "document ($unset), start it again, and repair the documents manually."
                )
                missing.append(failing("backlog_missing", text))
        yield from self._summed(missing, "have stored changes that are gone", None)
        for each in seen.handlers:
            if not each.is_registered and each.stored != 0:
                count = "Changes" if each.stored is None else number(each.stored, "change", "changes")
                yield degraded(
                    "backlog_unserved",
                    f"{count} of {each.name} {'is' if each.stored == 1 else 'are'} stored, and this app has no such "
                    f"handler. They take room under spill_bytes until it is back, or "
                    f"`{self._line.changes('remove', each.name)}` removes them.",
                )

    def _largest(self) -> str:
        stored = [(handler, each) for handler in self._snapshot.handlers for each in handler.partitions if each.stored]
        stored.sort(key=lambda found: -((found[1].stored and found[1].stored.count) or 0))
        return ", ".join(f"{handler.name}/{each.index} ({each.state})" for handler, each in stored[:NAMED]) or (
            f"`{self._line.changes('status', '--all')}` shows it"
        )

    # -- what is left over -------------------------------------------------------------------------

    def _rest(self) -> Iterator[Finding]:
        seen = self._snapshot
        repartitioning = []
        for each in self._served:
            found = each.repartitioning
            if found is None or each.state == "stopped":  # that is a finding of its own
                continue
            if _seconds(found.since, seen.at) >= REPARTITIONING_SECONDS:
                text = (
                    f"{each.name} waits for its {found.partitions} partitions since {moment(found.since)}: "
                    f"{cut(found.waits)}. Until then the old ones serve."
                )
                repartitioning.append(degraded("repartitioning", text))
        yield from self._summed(repartitioning, "wait for new partitions", None)
        for snapshot in seen.snapshots:
            if snapshot.state in ("failed", "source gone"):
                can_resume = snapshot.state == "failed"
                rest = "Resume it: it continues at its place." if can_resume else "Stop it to acknowledge that."
                yield failing(
                    "snapshot_failed",
                    f"The snapshot of {unquote(snapshot.source)} for {snapshot.handler} has ended after "
                    f"{snapshot.done} documents: {cut(snapshot.reason or 'no reason is recorded')}. The others are not "
                    f"delivered. {rest}",
                    self._line.changes("snapshot", "resume" if can_resume else "stop", snapshot.id),
                )
        yield from self._dead_letters()
        yield from self._unregistered()

    def _dead_letters(self) -> Iterator[Finding]:
        count, names = self._snapshot.dead_letters, [each.name for each in self._snapshot.handlers if each.dead_letters]
        if not count:
            return
        keys = sum(each.parked_keys for each in self._snapshot.handlers)
        them = "it" if count == 1 else "them"
        text = f"{listed(names)} {'has' if len(names) == 1 else 'have'} " if names else "There are "
        text += f"{number(count, 'dead letter', 'dead letters')}. "
        if self._snapshot.oversized:
            text += f"One could not be read: {cut(self._snapshot.oversized)}. "
        if keys:
            text += (
                f"{number(keys, 'key is', 'keys are')} parked: later changes of {'it' if keys == 1 else 'them'} join. "
            )
        command = self._line.changes("dead-letters", "list")
        yield degraded("dead_letters", f"{text}Look at {them}, then replay or discard {them}.", command)

    def _unregistered(self) -> Iterator[Finding]:
        handlers = self._snapshot.handlers
        gone = [each for each in handlers if not each.is_registered]
        if not gone or not self._served:  # else `handlers` says it
            return
        halted = sum(len(each.list_in("halted")) for each in gone)
        stand = f" ({number(halted, 'partition', 'partitions')} halted)" if halted else ""
        first, new = gone[0].name, [each.name for each in handlers if each.state == "new"]
        beside = f" of {listed(new)}" if new else ""
        yield degraded(
            "unregistered",
            f"This app has no handler {listed([each.name for each in gone])}{stand}, of which positions are stored. "
            "Its changes are not handled. Import the module with the @bridge.on_change function. If you renamed the "
            f"function, write name={first!r} in the decorator{beside}: it keeps the position. If you removed it, run "
            f"`{self._line.changes('remove', first)}`.",
        )

    def _dropped(self) -> Iterator[Finding]:
        seen = self._snapshot
        if FOREIGN in seen.dropped_lately:
            sender = f", the last one by process {unquote(seen.foreign_sender)}" if seen.foreign_sender else ""
            yield degraded(
                "foreign_bridge",
                f"Workers have dropped {seen.dropped.get(FOREIGN, 0)} messages of another installation or "
                f"environment{sender}. It may use this bridge name on this broker, and take your messages. Give one of "
                "the two another name, Bridge(..., name='...'), or a broker database of its own. If the workers' log "
                "names a handler with other databases, deploy the same code and settings to both.",
            )
        bad = [reason for reason in (FORGED, TAMPERED, MALFORMED) if reason in seen.dropped_lately]
        if bad:
            numbers = ", ".join(f"{seen.dropped.get(reason, 0)} {reason}" for reason in bad)
            yield degraded(
                "dropped_messages",
                f"Workers have dropped {numbers} messages, the last within the hour. Find out who else writes to the "
                "broker.",
            )

    def _summed(self, found: Sequence[Finding], rest: str, command: str | None) -> Iterator[Finding]:
        """
        Findings of one code, one a handler: the first ones, and one for all others.

        Args:
            rest: the fact about the others, after their number.
            command: the one that helps them all.
        """
        yield from found[:NAMED]
        others = found[NAMED:]
        if others:
            worst = min(others, key=_rank)
            text = f"{number(len(others), 'more handler', 'more handlers')} {rest}."
            text += f" `{self._line.changes('status', '--all')}` shows them."
            yield Finding(worst.code, worst.severity, text, command)


def _key(partition: PartitionStatus) -> str:
    return cut(partition.key or "a change")


def _is_stored(halted: PartitionStatus) -> bool:
    """Return True if the change at which a partition halted is stored, so that it can run again."""
    return bool(halted.stored and halted.key_token and halted.key_token <= halted.stored.to)


def _lag_of_flowing(handler: HandlerStatus) -> int:
    """Return the age of the oldest change of a handler that is not blocked, as far as it is known."""
    ages = [each.oldest_seconds or 0 for each in handler.partitions if not each.is_blocked]
    if not any(each.is_blocked for each in handler.partitions):
        ages.append(handler.lag_seconds or 0)
    return max(ages, default=0)


def _seconds(since: datetime | None, at: datetime | None) -> float:
    return 0.0 if since is None or at is None else (at - since).total_seconds()
