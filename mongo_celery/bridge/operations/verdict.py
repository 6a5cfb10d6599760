"""
The verdict on a bridge: healthy, degraded or failing, with the reasons and the command that cures each.

There is one judgement for all views: from a status alone, or with what was found by asking broker and workers beside
it. A verdict from a status alone says so (`note`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from mongo_celery.bridge.identity import ways_out
from mongo_celery.bridge.operations.reasons import (
    UNLED_SECONDS,
    UNREAD_SECONDS,
    Reason,
    cut,
    degraded,
    failing,
    listed,
)
from mongo_celery.bridge.operations.running_long import running_long, slots_of
from mongo_celery.bridge.operations.spill_check import judge_spill
from mongo_celery.bridge.operations.standing_reasons import standing_reasons
from mongo_celery.bridge.operations.status import read_status
from mongo_celery.command_line import CommandLine
from mongo_celery.findings import Finding
from mongo_celery.quantities import duration, moment, number, size

if TYPE_CHECKING:
    from mongo_celery.bridge.wiring import Wiring

State = Literal["healthy", "degraded", "failing"]

EXIT_CODES: Mapping[str, int] = {"healthy": 0, "degraded": 1, "failing": 2}
"""Of the commands that say a verdict."""

_ASKED = frozenset({
    "foreign_bridge", "dropped_messages", "layout", "broker", "consumers", "worker_tasks",
})  # fmt: skip
"""Findings that are reasons under the same name. What is about a bridge's settings is no reason."""
_OF_SPILL = frozenset({"spill_refused", "spill_bound", "spill_unserved"})


@dataclass(frozen=True, slots=True)
class BridgeVerdict:
    """
    How a bridge is.

    Attributes:
        bridge: its name.
        reasons: why it is not healthy, the worst first; empty where it is.
        note: who was not asked, and the command that asks them; None where everybody was.
    """

    bridge: str
    reasons: tuple[Reason, ...] = ()
    note: str | None = None

    @property
    def state(self) -> State:
        """`failing` while anything stands still until somebody acts, or is about to be lost."""
        return self.reasons[0].severity if self.reasons else "healthy"

    @property
    def exit_code(self) -> int:
        """0 healthy, 1 degraded, 2 failing."""
        return EXIT_CODES[self.state]

    def plain(self) -> dict[str, Any]:
        """As JSON: `verdict`, `note`, and `reasons` with `code`, `severity`, `sentence` and `command`."""
        return {"verdict": self.state, "note": self.note, "reasons": [reason.plain() for reason in self.reasons]}


def judge(
    status: Mapping[str, Any], findings: Iterable[Finding] = (), line: CommandLine | None = None
) -> BridgeVerdict:
    """
    The verdict. Pure.

    Args:
        status: as `read_status` gives it.
        findings: of a preflight, where it was asked for: of the lease, the broker and the workers. Without any the
            verdict has its `note`.
        line: how the person who is told types commands.
    """
    line = line or CommandLine()
    asked = list(findings)
    idle = list(_working(status, asked, line))
    running = running_long(status, slots_of(asked), line)
    # Where nobody works everything is late: one cause, and one command.
    standing = (each for each in standing_reasons(status, line, running) if not (idle and each.code == "lag"))
    reasons = [
        *_listening(status, line),
        *_handlers(status, line),
        *_publishing(status),
        *idle,
        *standing,
        *(_from_finding(each) for each in judge_spill(status, line) if each.code in _OF_SPILL),
        *(_from_finding(each, line) for each in asked if each.code in _ASKED and each.severity != "ok"),
    ]
    return BridgeVerdict(status["bridge"], tuple(sorted(reasons, key=lambda reason: reason.rank)), _note(asked, line))


def _note(asked: Sequence[Finding], line: CommandLine) -> str | None:
    if not asked:
        ask = line.changes("health")
        return f"This is as far as MongoDB tells: broker and workers were not asked. To ask them, run: {ask}"
    silent = next((each for each in asked if each.code == "workers" and each.severity != "ok"), None)
    return None if silent is None else f"Workers were not asked: {cut(silent.sentence)}."


def unreadable(bridge: str, sentence: str) -> BridgeVerdict:
    """The verdict where the state cannot be read: MongoDB does not answer, refuses the login, or a right is missing."""
    return BridgeVerdict(bridge, (failing("state_unreadable", sentence),))


def read_verdict(
    wiring: Wiring, line: CommandLine, ask: Callable[[Wiring], Sequence[Finding]] | None = None
) -> BridgeVerdict:
    """
    Read a bridge's state, and judge it.

    Args:
        ask: what else to look at; nothing by default, so that nobody but MongoDB is asked.

    Raises:
        MongoCeleryError: as for `read_status`.
    """
    status = read_status(wiring)
    return judge(status, ask(wiring) if ask is not None else (), line)


def _from_finding(finding: Finding, line: CommandLine | None = None) -> Reason:
    command = line.celery("worker") if line is not None and finding.code == "consumers" else None
    return (failing if finding.severity == "failing" else degraded)(finding.code, finding.sentence, command)


# -- the listener and what it reads ----------------------------------------------------------------


def _listening(status: Mapping[str, Any], line: CommandLine) -> Iterator[Reason]:
    start = line.celery("listener")
    if status["state"] == "never_started":
        yield degraded("never_started", "No listener has ever led: nothing is read, and no change is handled.", start)
    elif status["state"] == "idle":
        since = status["unled_seconds"]
        gone = "Nobody leads" if since is None else f"Nobody has led for {duration(since)}"
        if since is not None and since < UNLED_SECONDS:
            yield degraded("no_listener", f"{gone}: nothing is read, which in a deploy ends by itself.", start)
        else:
            yield failing("no_listener", f"{gone}: nothing is read, and no change is handled.", start)
    elif status["state"] == "history_lost" and any(_has_lost_history(each) for each in status["subscriptions"]):
        text = "Nobody leads, since every handler has lost its history: decide for each of them, then start a listener."
        yield failing("no_listener", text)
    elif status["state"] != "leading":
        yield failing("no_listener", f"Nobody leads, and the last listener ended with: {cut(status['error'])}.", start)
    elif status["unread_seconds"]:
        why = cut(status["reading_waits"] or "the server has not answered")
        yield (failing if status["unread_seconds"] >= UNREAD_SECONDS else degraded)(
            "reading_waits", f"Nothing has been read for {duration(status['unread_seconds'])}, for any handler: {why}."
        )
    if status["locked"]:
        yield degraded(
            "locked",
            f"Open transactions have locked {listed(status['locked'])}: they are led when the server ends these, "
            "within a minute by default.",
        )


def _has_lost_history(subscription: Mapping[str, Any]) -> bool:
    return bool(subscription["state"] == "history_lost")


def _handlers(status: Mapping[str, Any], line: CommandLine) -> Iterator[Reason]:
    registered = [each["name"] for each in status["subscriptions"] if each["state"] != "unregistered"]
    if not registered:
        yield failing(
            "handlers",
            "This app has no handler for the bridge: import the module with the @bridge.on_change functions, for "
            "example with include=[...] of the Celery app.",
        )
    for each in status["subscriptions"]:
        if each["match_refused"]:
            yield failing(
                "match_refused",
                f"Handler {each['name']} gets no change, since the server refuses its match: "
                f"{cut(each['match_refused'])}. Its position is kept. Correct it, and start a listener with this code.",
            )
        if each["fed_back"]:
            found = each["fed_back"]
            yield degraded(
                "fed_back",
                f"Handler {each['name']} was given {found['count']} changes of {cut(found['key'])} in a row since "
                f"{moment(found['since'])}, each written while it handled the one before. If it writes to what it "
                "watches, it feeds itself: watch only other fields, with fields=.",
            )
    listener = status["listener"]
    process = f"process {listener['pid']} on {listener['host']}" if listener is not None else None
    if status["difference"]:
        leader = f"{process} leads it" if process else "no listener is running"
        yield failing(
            "identity",
            f"This bridge is that of another app or environment: {cut(status['difference'])} ({leader}). Changes that "
            f"this app waits for are not handled. {ways_out(line.celery('listener', '--take-over'))}",
        )
    elif listener is not None:
        yield from _other_code(registered, listener, f"The listener that leads ({process})", line)


def _other_code(
    registered: Sequence[str], listener: Mapping[str, Any], process: str, line: CommandLine
) -> Iterator[Reason]:
    """A deploy that is under way, or an old process that it has left."""
    lacking = [repr(each) for each in sorted(set(registered) - set(listener["handlers"]))]
    found = [f"does not have {listed(lacking)}, so nobody handles these changes"] if lacking else []
    if listener["changed"]:
        found.append(f"has another definition of {listed([repr(each) for each in listener['changed']])}")
    if found:
        text = f"{process} {', and '.join(found)}. A deploy ends it; if none is under way, end it and start this code."
        yield degraded("definitions", text, line.celery("listener"))


# -- the way to the workers ------------------------------------------------------------------------


def _publishing(status: Mapping[str, Any]) -> Iterator[Reason]:
    if status["broker_down"]:
        yield failing(
            "broker_down",
            "The listener cannot publish, since the broker does not answer, or takes nothing: no change reaches a "
            "worker. What is read is kept.",
        )
    if status["rejected_by_broker"]:
        what, waits = _rejection(status["rejected_by_broker"][0], status["rejected_by_broker_count"])
        text = f"The broker rejects {what}. {waits}: raise the broker's limit on a message, or lower max_message_bytes."
        yield failing("broker_rejects", text)
    if status["not_stored"]:
        first, count = status["not_stored"][0], status["not_stored_count"]
        more = f", and of {number(count - 1, 'more partition', 'more partitions')}" if count > 1 else ""
        text = (
            f"MongoDB does not store changes of {first['partition']}{more}, since {moment(first['since'])}: "
            f"{cut(first['error'])}. They wait in the listener's memory: the listener's user lacks a right on the "
            "collection backlog of the state database, or MongoDB has no room on the disk."
        )
        yield failing("not_stored", text)


def _rejection(first: Mapping[str, Any], count: int) -> tuple[str, str]:
    more = f", and {count - 1} more" if count > 1 else ""
    waits = "Its partition waits" if count == 1 else "Their partitions wait"
    what = f"{cut(first['key'])} ({size(first['bytes'])}){more}, since {moment(first['since'])}: {cut(first['error'])}"
    return what, waits


def _working(status: Mapping[str, Any], asked: Sequence[Finding], line: CommandLine) -> Iterator[Reason]:
    """Whether anybody works: as they answered, where they were asked; else as what they leave undone shows it."""
    silent = any(each.code == "no_worker" for each in asked)
    if (untaken := status["untaken"]) and untaken.get("unclaimed"):
        text = (
            f"Workers take what was sent to {listed(untaken['queues'])} and claim nothing: changes there wait. Look "
            "for claim_failed in their log, such as a missing right in MongoDB, and run the check as their user."
        )
        yield failing("unclaimed", text, line.changes("check"))
        return
    if any(each.code == "workers" and each.severity == "ok" for each in asked):
        return
    start = line.celery("worker")
    if untaken and not silent and untaken["answered"]:
        yield failing(
            "consumers", f"No running worker consumes {listed(untaken['queues'])}: changes there wait.", start
        )
        return
    if any((each["claim"] and each["claim"]["live"]) or each["handled"] for each in status["partitions"]):
        return  # a busy solo pool does not answer
    sent = status["outstanding"] or 0
    silent = silent or bool(untaken and untaken["answered"] is False)
    if silent and sent:
        text = f"No worker answers, and {number(sent, 'run of changes waits', 'runs of changes wait')} for one."
        yield failing("no_worker", text, start)
    elif silent:
        yield degraded("no_worker", "No worker answers: the next change waits for one.", start)
    elif untaken:
        text = f"No worker takes what was sent to {listed(untaken['queues'])}, and workers cannot be asked."
        yield degraded("no_worker", text, start)
