"""Preflight of the lease: its layout, and what its workers have dropped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from pymongo.errors import PyMongoError

from mongo_celery.bridge.state.leases import FOREIGN, FORGED, MALFORMED, TAMPERED
from mongo_celery.findings import Finding, degraded

if TYPE_CHECKING:
    from mongo_celery.bridge.wiring import Wiring

_RECENT = timedelta(hours=1)


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
    led = (lease.get("report") or {}).get("partitions")
    if lease.get("live") and led not in (None, partitions):
        yield degraded(
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
    yield from _dropped(lease, now)


def _dropped(lease: Mapping[str, Any], now: datetime) -> Iterator[Finding]:
    counts = lease.get("dropped") or {}
    recent = {reason for reason, at in (lease.get("droppedAt") or {}).items() if now - _aware(at) < _RECENT}
    if FOREIGN in recent:
        process = lease.get("foreignSender")
        yield degraded(
            "foreign_bridge",
            f"Messages of another installation or environment arrive: {counts[FOREIGN]} were dropped, the last within "
            f"the hour{f', from process {process} as it says' if process else ''}. Another app or environment may use "
            "this bridge name on this broker, and take our messages. Give one of the two another name, "
            "Bridge(..., name='...'), or a broker database of its own. Where the workers' log names a handler that "
            "listens to other databases than the listener's, deploy the same code and settings to both.",
        )
    bad = [reason for reason in (FORGED, TAMPERED, MALFORMED) if reason in recent]
    if bad:
        numbers = ", ".join(f"{counts[reason]} {reason}" for reason in bad)
        yield degraded(
            "dropped_messages",
            f"Workers have dropped {numbers} messages, the last within the hour: find out who else writes to the "
            "broker.",
        )


def _aware(moment: datetime) -> datetime:
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
