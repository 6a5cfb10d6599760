"""Preflight of what is stored of changes that stand still: the bound, who would run it, and whether it is there."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mongo_celery.bridge.state.subscriptions import layouts_in_force
from mongo_celery.command_line import CommandLine
from mongo_celery.findings import NEAR, SERIOUS, Finding, degraded, failing, ok
from mongo_celery.mongo.opening import open_session
from mongo_celery.quantities import number, size

if TYPE_CHECKING:
    from mongo_celery.bridge.wiring import Wiring

_SHOWN = 3
_LOOKING_SECONDS = 3.0


def check_marks(wiring: Wiring) -> Iterator[Finding]:
    """Look for partitions that say that changes of theirs are stored, which are not; for some seconds at most."""
    store = wiring.store
    layouts = layouts_in_force(store.subscriptions.read_all())
    generations = {name: layout.generation for name, layout in layouts.items()}
    until = time.monotonic() + _LOOKING_SECONDS
    for image in store.partitions.of(generations):
        partition_id = store.partitions.partition_id(image.subscription, generations[image.subscription], image.index)
        if image.spilled and time.monotonic() < until and _is_bare(wiring, partition_id):
            yield failing(
                "spill_missing",
                f"Partition {image.index} of {image.subscription} says that changes of it are stored, and none is: "
                "somebody has removed documents of the collection backlog in the state database, or has restored only "
                "a part of that database. It stands still until they are back: restore them from a backup. If there is "
                "none they are lost: end the listener, remove `spilled` from the partition's document ($unset), start "
                "it again, and make up for them manually.",
            )


def _is_bare(wiring: Wiring, partition_id: str) -> bool:
    """
    Whether nothing is stored within a mark, by a session that has seen it: so that no old primary can say so.

    The mark is looked at twice, since what was stored is removed once it is committed.
    """
    store = wiring.store
    with open_session(wiring.client, causal_consistency=True) as session:
        seen = set()
        for _ in range(2):
            images = store.partitions.look([partition_id], session)
            after, to = (images[0].data, (images[0].spilled or {}).get("to", "")) if images else ("", "")
            if to <= after or store.backlog.outline(partition_id, after, to, 1, session):
                return False
            seen.add((after, to))
    return len(seen) == 1


def judge_spill(status: Mapping[str, Any], line: CommandLine) -> Iterator[Finding]:
    """Findings from a status, as `read_status` gives it; none where nothing is stored."""
    spilled = [each for each in status["partitions"] if each["spilled"]]
    if not spilled and not status["spill"]["bytes"] and not status["spill"]["waits"]:
        return
    findings = [
        *_refused(status),
        *_beside_the_bound(status, spilled, line),
        *_unled(status, spilled),
        *_unserved(status, line),
    ]
    yield from findings
    if not findings:
        share = status["spill"]["share"]
        known = f": {share:.0%} of spill_bytes" if share is not None else ""
        yield ok("spill", f"Changes of {_partitions(spilled)} are stored, and run when these go on{known}.")


def _refused(status: Mapping[str, Any]) -> Iterator[Finding]:
    waits = status["spill"]["waits"]
    if waits:
        yield failing("spill_refused", f"What stands is no longer stored: {waits}.")


def _beside_the_bound(
    status: Mapping[str, Any], spilled: Sequence[Mapping[str, Any]], line: CommandLine
) -> Iterator[Finding]:
    spill = status["spill"]
    share = spill["share"]
    if share is None or share < NEAR:
        return
    then = "At 100%, what stands waits in the listener's memory again, and the stream is not read for any"
    if share >= 1:
        then = "So what stands waits in the listener's memory, and once that is full the stream is not read for any"
    yield (failing if share >= SERIOUS else degraded)(
        "spill_bound",
        f"What is stored of changes that stand still takes {share:.0%} of {size(spill['limit'])} "
        f"(spill_bytes). {then}. Free the largest: {_largest(spilled, line)}; or raise spill_bytes, if "
        "the state database has room.",
    )


def _unled(status: Mapping[str, Any], spilled: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    if status["state"] != "leading" and spilled:
        yield degraded(
            "spill_unled",
            f"Changes of {_partitions(spilled)} are stored, and nobody leads: they wait for a listener, and lose "
            "nothing by it.",
        )


def _unserved(status: Mapping[str, Any], line: CommandLine) -> Iterator[Finding]:
    for each in status["subscriptions"]:
        if each["state"] == "unregistered" and each["spilled"]["partitions"]:
            count = each["spilled"]["count"]
            yield degraded(
                "spill_unserved",
                f"{'Changes' if count is None else number(count, 'change', 'changes')} of {each['name']} "
                f"{'is' if count == 1 else 'are'} stored, which has no handler in this app. What is stored waits for "
                f"one, or until `{line.changes('remove', each['name'])}` removes it. It takes room under "
                "spill_bytes meanwhile.",
            )


def _partitions(spilled: Sequence[Mapping[str, Any]]) -> str:
    return number(len(spilled), "partition", "partitions")


def _largest(spilled: Sequence[Mapping[str, Any]], line: CommandLine) -> str:
    largest_first = sorted(spilled, key=lambda each: each["spilled"]["count"] or 0, reverse=True)
    named = [f"partition {each['index']} of {each['subscription']} ({each['state']})" for each in largest_first]
    return ", ".join(named[:_SHOWN]) or f"`{line.changes('status', '--all')}` names them"
