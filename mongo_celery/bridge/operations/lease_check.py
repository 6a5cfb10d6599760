"""Preflight of the lease: other listeners on its broker, its layout, and what its workers have dropped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from pymongo.errors import PyMongoError

from mongo_celery.bridge.state.drops import FOREIGN, FORGED, TAMPERED
from mongo_celery.findings import Finding, error, warning

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
        yield from judge_lease(lease, datetime.now(UTC))
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


def judge_lease(lease: Mapping[str, Any], now: datetime) -> Iterator[Finding]:
    """
    Findings from a lease.

    Args:
        lease: as read, with its verdict `live`.
        now: when; what was dropped more than an hour ago is no finding.
    """
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
