"""Preflight of the lease: whose handlers it serves, and what its workers have dropped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from pymongo.errors import PyMongoError

from mongo_celery.bridge.definitions import definitions_of
from mongo_celery.bridge.state.candidates import Definitions, is_of_this_term, is_other_app
from mongo_celery.bridge.state.drops import FOREIGN, FORGED, TAMPERED
from mongo_celery.findings import Finding, error, ok, warning

if TYPE_CHECKING:
    from mongo_celery.bridge.wiring import Wiring

_RECENT = timedelta(hours=1)
_STANDING = timedelta(minutes=2)
"""For what a listener repeats every half minute while it lasts."""


def check_lease(wiring: Wiring) -> Iterator[Finding]:
    """Look at what the lease says; nothing before the first start of a listener, or where it cannot be read."""
    try:
        lease = wiring.store.leases.read()
    except PyMongoError:  # what MongoDB lacks is found, and said, by its own part of the preflight
        return
    if lease is not None:
        selectors, _ = wiring.stream()
        yield from judge_lease(lease, definitions_of(wiring, selectors), datetime.now(UTC))
        yield from judge_layout(lease, wiring.options.partitions)


def judge_layout(lease: Mapping[str, Any], partitions: int) -> Iterator[Finding]:
    """A finding where the listener that leads spreads changes otherwise than this process, with so many partitions."""
    led = lease.get("partitions")
    if lease.get("live") and led not in (None, partitions):
        yield warning(
            "layout",
            f"The listener that leads spreads changes over {led} partitions, this app over {partitions}: workers with "
            "its options alone leave queues without a consumer. Deploy both with the same options.",
        )


def judge_lease(lease: Mapping[str, Any], mine: Definitions, now: datetime) -> Iterator[Finding]:
    """
    Findings from a lease.

    Args:
        lease: as read, with its verdict `live`.
        mine: the definitions of this process.
        now: when; what was dropped more than an hour ago is no finding.
    """
    if is_other_app(lease, mine):
        yield error(
            "app",
            f"This name belongs to the bridge of another app: {lease.get('app') or 'without a name'}, with handlers "
            f"{', '.join(sorted(lease['tasks']))}. Give Bridge another name='...'; or, if it is the same app, stop its "
            "listeners and run `changes adopt`.",
        )
    elif lease.get("live") and not is_of_this_term(lease):
        yield warning(
            "definitions",
            f"The listener that leads (process {lease.get('pid')} on {lease.get('host')}) does not say whose handlers "
            "it serves. One that has just begun says it in a moment; one of an earlier version of mongo_celery never "
            "does, and does not step down for newer code either: end it once that is deployed.",
        )
    elif lease.get("live"):
        unserved = sorted(mine.handlers.keys() - lease["definitions"].keys())
        if unserved:
            yield warning(
                "definitions",
                f"The listener that leads (process {lease.get('pid')} on {lease.get('host')}) does not know "
                f"{', '.join(unserved)}: deploy this code where listeners run.",
            )
        else:
            yield ok("definitions", "The listener that leads knows every handler of this app.")
    yield from _foreign_leader(lease, now)
    yield from _dropped(lease, now)


def _foreign_leader(lease: Mapping[str, Any], now: datetime) -> Iterator[Finding]:
    found = lease.get("foreignLeader") or {}
    if found and now - _aware(found["at"]) < _STANDING:
        yield error(
            "foreign_leader",
            f"Another listener leads a bridge of this name on this broker, with a state of its own ({found['who']}): "
            "each takes the other's messages, and a restart of either is refused while only the other leads. Give each "
            "bridge a name of its own, or each app a broker, virtual host, database or global_keyprefix of its own.",
        )


def _dropped(lease: Mapping[str, Any], now: datetime) -> Iterator[Finding]:
    counts = lease.get("dropped") or {}
    recent = {reason for reason, at in (lease.get("droppedAt") or {}).items() if now - _aware(at) < _RECENT}
    if FOREIGN in recent:
        yield error(
            "foreign_bridge",
            f"Another app uses this bridge name on this broker, with a state of its own (its listener: "
            f"{lease.get('foreignSender') or 'unknown'}): {counts[FOREIGN]} of its messages came here and were "
            "dropped, and ours go there. Give each bridge a name of its own, or each app a broker database of its own.",
        )
    bad = [reason for reason in (FORGED, TAMPERED) if reason in recent]
    if bad:
        numbers = " and ".join(f"{counts[reason]} {reason}" for reason in bad)
        yield warning(
            "dropped_messages",
            f"Workers have dropped {numbers} messages, the last within the hour: find out who else writes to the "
            "broker.",
        )


def _aware(moment: datetime) -> datetime:
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
