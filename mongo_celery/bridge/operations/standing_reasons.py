"""Reasons that are about single handlers: what of them is blocked, is late, was set aside, or is served by nobody."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from mongo_celery.bridge.listener.horizon import SERIOUS, THRESHOLDS
from mongo_celery.bridge.operations.reasons import (
    DEAD_LETTERS,
    LAG_SECONDS,
    LAYOUT_SECONDS,
    PARKED_SECONDS,
    Reason,
    cut,
    degraded,
    failing,
    listed,
    summed,
    where,
)
from mongo_celery.command_line import CommandLine
from mongo_celery.quantities import duration, moment, number

_STANDING = frozenset({"halted", "paused", "waiting", "retrying"})

Partition = Mapping[str, Any]
Subscription = Mapping[str, Any]


def standing_reasons(status: Mapping[str, Any], line: CommandLine, running: Sequence[Reason] = ()) -> Iterator[Reason]:
    """
    Return the reasons about single handlers.

    Args:
        status: as `read_status` gives it.
        running: about calls that run for long, which come first.
    """
    yield from running
    served = [each for each in status["subscriptions"] if each["state"] != "unregistered"]
    partitions: dict[str, list[Partition]] = {each["name"]: [] for each in served}
    for each in status["partitions"]:
        partitions.get(each["subscription"], []).append(each)
    concerned = [(each, partitions[each["name"]]) for each in served]
    yield from _halted(concerned, line)
    yield from _paused(concerned, line)
    yield from _waiting(concerned, line)
    yield from _parked(concerned, line)
    yield from _missing(concerned, line)
    yield from _stopped(concerned, line)
    yield from _histories(status, concerned, line)
    yield from _late(status, concerned, line, running)
    yield from _layouts(status, served, line)
    yield from _dead_letters(status, line)
    yield from _snapshots(status, line)
    yield from _unregistered(status, line)


Concerned = Sequence[tuple[Subscription, Sequence[Partition]]]


def _snapshots(status: Mapping[str, Any], line: CommandLine) -> Iterator[Reason]:
    """Those that stand until somebody acts; the changes of their handlers flow."""
    for each in status.get("snapshots", ()):
        if each["state"] not in ("failed", "source gone"):
            continue
        can_go_on = each["state"] == "failed"
        rest = "It continues where it is when it is resumed." if can_go_on else "To acknowledge it, stop it."
        yield failing(
            "snapshot_failed",
            f"The snapshot of {each['source']} for {each['handler']} has ended after {each['done']} documents: "
            f"{cut(each['sentence'] or 'no reason is recorded')}. What it has not read is not delivered. {rest}",
            line.changes("snapshot", "resume" if can_go_on else "stop", each["id"]),
        )


def _all(line: CommandLine) -> str:
    return f"`{line.changes('status', '--all')}` shows them"


def _in(partitions: Sequence[Partition], state: str) -> list[Partition]:
    return [each for each in partitions if each["state"] == state]


def _indexes(partitions: Sequence[Partition]) -> list[int]:
    return [each["index"] for each in partitions]


# -- what stands -----------------------------------------------------------------------------------


def _halted(concerned: Concerned, line: CommandLine) -> Iterator[Reason]:
    retried, skipped = [], []
    for each, partitions in concerned:
        halted = _in(partitions, "halted")
        gone = [] if each["state"] != "history_lost" else [one for one in halted if not _is_stored(one)]
        kept = [one for one in halted if one not in gone]
        if kept:
            retried.append(_halt(each, kept, line))
        if gone:
            skipped.append(_lost_halt(each, gone, line))
    yield from summed(retried, f"have halted partitions; {_all(line)}.", line.changes("retry"))
    yield from summed(skipped, f"have partitions that halted at changes whose history is lost; {_all(line)}.", None)


def _halt(subscription: Subscription, halted: Sequence[Partition], line: CommandLine) -> Reason:
    first, indexes = halted[0], _indexes(halted)
    has, its, it = "has halted at", "Its", "it"
    if len(halted) > 1:
        has, its, it = "have halted, the first at", "Their", "them"
    name = subscription["name"]
    reason = cut((first["retry"] or {}).get("error") or "no error is recorded")
    return failing(
        "halted",
        f"{where(subscription, indexes)} {has} {_key(first)}: {reason}. {its} later changes wait. "
        f"`{line.changes('head', name, str(indexes[0]))}` shows the change, `{line.on('skip', name, indexes)}` "
        f"moves {it} to the dead letters. To run {it} again, fix the cause and retry {it}.",
        line.on("retry", name, indexes),
    )


def _lost_halt(subscription: Subscription, halted: Sequence[Partition], line: CommandLine) -> Reason:
    name, indexes = subscription["name"], _indexes(halted)
    has = "has halted at" if len(halted) == 1 else "have halted, the first at"
    return failing(
        "halted",
        f"{where(subscription, indexes)} {has} {_key(halted[0])}, whose history is lost: unless "
        f"`{line.changes('head', name, str(indexes[0]))}` has its bytes, it cannot run any more. "
        "Repair what it stands for manually, then skip it.",
        line.changes("skip", name, str(indexes[0])),
    )


def _key(partition: Partition) -> str:
    return cut((partition["head"] or {}).get("key") or "a change")


def _is_stored(halted: Partition) -> bool:
    """Whether the change at which a partition halted is within its mark, so that it can run again."""
    return bool(halted["spilled"] and halted["head"] and halted["head"]["token"] <= halted["spilled"]["to"])


def _paused(concerned: Concerned, line: CommandLine) -> Iterator[Reason]:
    paused = [(each, _in(partitions, "paused")) for each, partitions in concerned]
    if len(concerned) > 1 and all(len(found) == each["partitions"] for each, found in paused):
        yield degraded(
            "paused",
            f"All {len(concerned)} handlers are paused: none starts, and what comes is stored until they are resumed.",
            line.changes("resume"),
        )
        return
    found = [
        degraded(
            "paused",
            f"{where(each, _indexes(standing))} {'is' if len(standing) == 1 else 'are'} paused: no handler starts, and "
            f"what comes is stored until {'it is' if len(standing) == 1 else 'they are'} resumed.",
            line.on("resume", each["name"], _indexes(standing)),
        )
        for each, standing in paused
        if standing
    ]
    yield from summed(found, f"have paused partitions; {_all(line)}.", line.changes("resume"))


def _waiting(concerned: Concerned, line: CommandLine) -> Iterator[Reason]:
    found = []
    for each, partitions in concerned:
        standing = _in(partitions, "waiting")
        if standing:
            first = min(standing, key=lambda one: one["waiting"]["since"] or "")["waiting"]
            waits = "waits" if len(standing) == 1 else "wait"
            text = (
                f"{where(each, _indexes(standing))} {waits} since {moment(first['since'])}, with "
                f"{number(first['count'], 'attempt', 'attempts')}: {cut(first['cause'])}. If a server is away, "
                "restore it, or the handler's way to it. Then the change runs automatically within half a minute, or "
                "immediately when it is retried."
            )
            found.append(degraded("waiting", text, line.on("retry", each["name"], _indexes(standing))))
    yield from summed(found, f"wait; {_all(line)}.", line.changes("retry"))


def _parked(concerned: Concerned, line: CommandLine) -> Iterator[Reason]:
    found = []
    for each, partitions in concerned:
        late = [one for one in _in(partitions, "retrying") if one["retry"]["due_seconds"] > PARKED_SECONDS]
        if late:
            longest = max(late, key=lambda one: one["retry"]["due_seconds"])
            text = (
                f"{where(each, _indexes(late))} {'is' if len(late) == 1 else 'are'} parked for up to "
                f"{duration(longest['retry']['due_seconds'])}, since the handler asked for a retry then, at "
                f"{_key(longest)}: later changes wait. "
                f"`{line.changes('head', each['name'], str(longest['index']))}` shows it."
            )
            found.append(degraded("parked", text, line.on("retry", each["name"], _indexes(late))))
    yield from summed(found, f"have changes that are parked for long; {_all(line)}.", line.changes("retry"))


def _missing(concerned: Concerned, line: CommandLine) -> Iterator[Reason]:
    found = []
    for each, partitions in concerned:
        bare = [one for one in partitions if (one["spilled"] or {}).get("missing")]
        if bare:
            text = (
                f"{where(each, _indexes(bare))} stands still: what should be stored of it is not there. Restore the "
                f"collection backlog of the state database from a backup. "
                f"Without one: `{line.changes('check')}` says what to do."
            )
            found.append(failing("spill_missing", text))
    yield from summed(found, f"have stored changes that are missing; {_all(line)}.", None)


# -- what is late ----------------------------------------------------------------------------------


def _stopped(concerned: Concerned, line: CommandLine) -> Iterator[Reason]:
    stopped = [each for each, _ in concerned if each["stopped"]]
    reasons = [failing("stopped", f"{each['name']} is stopped: {each['stopped']}") for each in stopped]
    yield from summed(reasons, f"are stopped; {_all(line)}.", None)


def _histories(status: Mapping[str, Any], concerned: Concerned, line: CommandLine) -> Iterator[Reason]:
    lost, near = [], []
    leads = status["state"] == "leading"
    for each, partitions in concerned:
        if each["lost"]:
            lost.append(_lost(each, line))
        elif each["oplog_share"] is not None and each["oplog_share"] >= THRESHOLDS[0]:
            near.append(_near(each, partitions, line, leads=leads))
    yield from summed(lost, f"have lost their history; {_all(line)}.", None)
    near.sort(key=lambda reason: reason.rank)
    yield from summed(near, f"are about to lose their history; {_all(line)}.", None)


def _lost(subscription: Subscription, line: CommandLine) -> Reason:
    name, lost = subscription["name"], subscription["lost"]
    return failing(
        "history_lost",
        f"{name} has lost its history before {moment(lost['oldest'])} and is blocked. Continue with the oldest entry "
        f"of the oplog, or with `{line.changes('reset', name, '--to', 'now')}`, and repair what lies between manually.",
        line.changes("reset", name, "--to", "oldest"),
    )


def _near(subscription: Subscription, partitions: Sequence[Partition], line: CommandLine, *, leads: bool) -> Reason:
    name, share = subscription["name"], subscription["oplog_share"]
    halted, paused = _indexes(_in(partitions, "halted")), _indexes(_in(partitions, "paused"))
    cure, command = "Enlarge the oplog with replSetResizeOplog, or add workers.", None
    if not leads:
        cure, command = "Let a listener lead.", line.celery("listener")
    elif not _is_given_changes(subscription):
        cure, command = "It gets no changes until its definition is put right.", None
    elif halted:
        cure, command = "What has halted holds it there.", line.on("retry", name, halted)
    elif paused:
        cure, command = "What is paused holds it there.", line.on("resume", name, paused)
    return (failing if share >= SERIOUS else degraded)(
        "history_at_risk",
        f"{share:.0%} of the oplog's window lie behind {name}: from 100% on, what was not read is lost. {cure}",
        command,
    )


def _late(
    status: Mapping[str, Any], concerned: Concerned, line: CommandLine, running: Sequence[Reason]
) -> Iterator[Reason]:
    """The lag of each handler, but for what is blocked: that has a reason of its own."""
    if status["state"] != "leading":
        return
    lags = {
        each["name"]: _lag_of_flowing(each, partitions) for each, partitions in concerned if _is_given_changes(each)
    }
    late = sorted(
        (each for each, _ in concerned if lags.get(each["name"], 0) >= LAG_SECONDS),
        key=lambda each: -lags[each["name"]],
    )
    if not late:
        return
    is_late = "is" if len(late) == 1 else "are"
    gains = [f" For {each['name']}, {each['run_gain']['sentence']}." for each in late if each.get("run_gain")]
    cure = f"More workers help, or faster handlers.{''.join(gains[:1])}"
    if running:
        cure = "End the calls that run for long first."
    yield degraded(
        "lag",
        f"{listed([each['name'] for each in late])} {is_late} {duration(lags[late[0]['name']])} behind: the oldest "
        f"change has waited for so long. {cure}",
        None if running else line.celery("worker"),
    )


def _is_given_changes(subscription: Subscription) -> bool:
    return not (subscription["stopped"] or subscription["match_refused"] or subscription["lost"])


def _lag_of_flowing(subscription: Subscription, partitions: Sequence[Partition]) -> int:
    """Return the age of the oldest change of a handler that is not blocked, as far as it is known."""
    blocked = any(one["state"] in _STANDING for one in partitions)
    ages = [one["oldest_seconds"] for one in partitions if one["state"] not in _STANDING]
    return max((age or 0 for age in [*ages, None if blocked else subscription["lag_seconds"]]), default=0)


def _layouts(status: Mapping[str, Any], served: Sequence[Subscription], line: CommandLine) -> Iterator[Reason]:
    now = datetime.fromisoformat(status["at"])
    found = [
        degraded(
            "layout_waits",
            f"{each['name']} waits for its {each['new_layout']['partitions']} partitions since "
            f"{moment(each['new_layout']['since'])}: {cut(each['new_layout']['waits'])}. Until then the old ones "
            "serve.",
        )
        for each in served
        if each["new_layout"]
        and (now - datetime.fromisoformat(each["new_layout"]["since"])).total_seconds() >= LAYOUT_SECONDS
    ]
    yield from summed(found, f"wait for new partitions; {_all(line)}.", None)


# -- what is left over -----------------------------------------------------------------------------


def _dead_letters(status: Mapping[str, Any], line: CommandLine) -> Iterator[Reason]:
    count = status["dead_letters"]
    if count >= DEAD_LETTERS:
        names = [each["name"] for each in status["subscriptions"] if each["dead_letters"]]
        of, it = f" of {listed(names)}" if names else "", "it" if count == 1 else "them"
        yield degraded(
            "dead_letters",
            f"{number(count, 'change', 'changes')}{of} {'was' if count == 1 else 'were'} set aside: nobody handles "
            f"{it} any more. {_oversized(status)}{_parked_keys(status)}Look at {it}, then replay or discard {it}.",
            line.changes("dead-letters", "list"),
        )


def _oversized(status: Mapping[str, Any]) -> str:
    """Return a sentence about a change that was too large to be read; empty where there is none."""
    return f"One could not be read: {cut(status['oversized'])}. " if status["oversized"] else ""


def _parked_keys(status: Mapping[str, Any]) -> str:
    keys = sum(each["parked_keys"] for each in status["subscriptions"])
    if not keys:
        return ""
    parked = number(keys, "key is parked: later changes of it join", "keys are parked: later changes of theirs join")
    return f"{parked} them. "


def _unregistered(status: Mapping[str, Any], line: CommandLine) -> Iterator[Reason]:
    gone = {each["name"] for each in status["subscriptions"] if each["state"] == "unregistered"}
    if gone and len(gone) < len(status["subscriptions"]):  # else `handlers` says it
        halted = sum(each["subscription"] in gone and each["state"] == "halted" for each in status["partitions"])
        stand = f" ({number(halted, 'partition', 'partitions')} halted)" if halted else ""
        first, new = min(gone), sorted(each["name"] for each in status["subscriptions"] if each["state"] == "new")
        beside = f" of {listed(new)}" if new else ""
        yield degraded(
            "unregistered",
            f"{listed(sorted(gone))} {'is' if len(gone) == 1 else 'are'} stored{stand}, but without a handler in this "
            "app: nobody handles these changes. Import the module with the @bridge.on_change function. If you renamed "
            f"the function, write name={first!r} in the decorator{beside}: it keeps the position. If you removed the "
            f"handler, run `{line.changes('remove', first)}`, which removes everything that is stored of it.",
        )
