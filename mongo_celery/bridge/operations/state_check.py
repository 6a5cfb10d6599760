"""Preflight of the stored state: what stands, what was set aside, and whether anybody leads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mongo_celery.bridge.operations.findings import Finding, error, ok, warning
from mongo_celery.bridge.operations.spill_check import check_marks, judge_spill
from mongo_celery.bridge.operations.status import read_status

if TYPE_CHECKING:
    from mongo_celery.bridge.wiring import Wiring

_SHOWN = 3
_LONG_SECONDS = 3600


def check_state(wiring: Wiring) -> Iterator[Finding]:
    """Read the bridge's state, and judge it."""
    status = read_status(wiring)
    yield from judge_state(status)
    yield from judge_spill(status)
    yield from check_marks(wiring)


def judge_state(status: Mapping[str, Any]) -> Iterator[Finding]:
    """Findings from a status, as `read_status` gives it."""
    yield _leading(status)
    if status["unread_seconds"]:
        why = status["reading_waits"] or "the server has not answered"
        yield error("reading", f"Nothing has been read for {status['unread_seconds']} s: {why}.")
    if status["broker_down"]:
        yield error("publishing", "The listener cannot publish: the broker does not answer, or takes nothing.")
    yield from _standing(status)
    letters = status["dead_letters"]
    if letters:
        yield warning(
            "dead_letters",
            f"{letters} changes were set aside, into the collection dead_letters of the state database: repair what "
            "they stand for.",
        )
    unserved = [each["name"] for each in status["subscriptions"] if each["state"] == "unregistered"]
    if unserved:
        yield warning(
            "unregistered",
            f"{_named(unserved)} are stored, but have no handler in this app: their changes are handled by nobody. "
            "Import the module with their @bridge.on_change functions, or leave them if they were removed on purpose.",
        )


def _leading(status: Mapping[str, Any]) -> Finding:
    state = status["state"]
    if state == "leading":
        return ok("listener", f"One leads on {status['listener']['host']}, pid {status['listener']['pid']}.")
    if state == "never_started":
        return ok("listener", "None has ever led; start one with `celery -A ... listener`.")
    if state == "idle":
        return error("listener", "None leads, so nothing is read; start one with `celery -A ... listener`.")
    return error("listener", f"None leads, and the last one ended with: {status['error']}")


def _standing(status: Mapping[str, Any]) -> Iterator[Finding]:
    partitions = status["partitions"]
    lost = {each["name"] for each in status["subscriptions"] if each["state"] == "history_lost"}
    halted = [each for each in partitions if each["state"] == "halted"]
    paused = [each for each in partitions if each["state"] == "paused"]
    waiting = [each for each in partitions if each["state"] == "waiting"]
    for each in halted[:_SHOWN]:
        where = f"{each['subscription']} --partition {each['index']}"
        key = (each["head"] or {}).get("key") or "a change"
        reason = (each["retry"] or {}).get("error") or "no error is recorded"
        cure = f"Cure the cause, then `changes retry {where}`, or pass over this change with `changes skip {where}`."
        if each["subscription"] in lost and not _is_stored(each):
            cure = (
                f"Its history is lost: unless `changes head {each['subscription']} {each['index']}` has its bytes, it "
                f"cannot run any more: repair by hand, then `changes skip {where}`."
            )
        yield error("halted", f"Partition {each['index']} of {each['subscription']} stands at {key}: {reason}. {cure}")
    if len(halted) > _SHOWN:
        yield error("halted", f"{len(halted) - _SHOWN} more partitions are halted; `changes status` shows them.")
    if paused:
        names = _named(sorted({each["subscription"] for each in paused}))
        yield warning("paused", f"{len(paused)} partitions of {names} are paused; `changes resume` lets them flow.")
    yield from _waiting(waiting)
    late = [each for each in partitions if each["state"] == "parked" and each["retry"]["due_seconds"] > _LONG_SECONDS]
    yield from _parked(late)
    if not halted and not paused and not waiting and not late:
        yield ok("partitions", "None is halted or paused, waits for infrastructure, or is parked for long.")


def _is_stored(halted: Mapping[str, Any]) -> bool:
    """Whether the change at which a partition halted is within its mark, so that it can run again."""
    return bool(halted["spilled"] and halted["head"] and halted["head"]["token"] <= halted["spilled"]["to"])


def _parked(partitions: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    latest_first = sorted(partitions, key=lambda each: each["retry"]["due_seconds"], reverse=True)
    for each in latest_first[:_SHOWN]:
        hours = each["retry"]["due_seconds"] / 3600
        yield warning(
            "parked",
            f"Partition {each['index']} of {each['subscription']} is parked for {hours:.0f} h: its handler asked for a "
            "retry then, and all later changes of the partition wait. To run it now: "
            f"`changes retry {each['subscription']} --partition {each['index']}`.",
        )
    if len(partitions) > _SHOWN:
        yield warning("parked", f"{len(partitions) - _SHOWN} more partitions are; `changes status` shows them.")


def _waiting(partitions: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    oldest_first = sorted(partitions, key=lambda each: each["waiting"]["since"] or "")
    for each in oldest_first[:_SHOWN]:
        waiting = each["waiting"]
        yield warning(
            "waiting",
            f"Partition {each['index']} of {each['subscription']} has waited since {waiting['since']} for "
            f"infrastructure that its handler needs, with {waiting['count']} attempts: {waiting['cause']}. Restore it, "
            "or the handler's way to it; the change is tried again by itself, or at once with "
            f"`changes retry {each['subscription']} --partition {each['index']}`.",
        )
    if len(partitions) > _SHOWN:
        yield warning("waiting", f"{len(partitions) - _SHOWN} more partitions wait; `changes status` shows them.")


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
