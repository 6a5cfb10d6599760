"""How the change at which a partition stands looks on a terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from mongo_celery.quantities import duration, moment, number, size

if TYPE_CHECKING:
    from mongo_celery.bridge.operations.heads import Head


def head_lines(head: Head, most: int | None) -> Iterator[str]:
    """
    The lines that tell of a change.

    Args:
        most: characters of its event; None for all of them.
    """
    change = head.key or "its change is not known here"
    yield f"{head.subscription}, partition {head.index}, {head.state} at change {head.committed + 1}: {change}"
    if head.token is not None:
        yield f"  resume token: {head.token}"
    if head.state == "halted":
        yield f"  halted by: {head.error or 'unknown'}"
    elif head.error:
        yield f"  last error: {head.error}"
    counts = [
        number(count, *words)
        for count, words in ((head.retries, ("retry", "retries")), (head.crashes, ("crash", "crashes")))
        if count
    ]
    if head.due_seconds:
        counts.append(f"due in {duration(head.due_seconds)}")
    if counts:
        yield f"  {', '.join(counts)}"
    since = f" since {moment(head.since)}" if head.since else ""
    if head.bytes is None:
        yield f"  its bytes are not stored{since and f'; it waits{since}'}"
        return
    yield f"  stored{since}, {size(head.bytes)}:"
    yield from _event(head, most)


def _event(head: Head, most: int | None) -> Iterator[str]:
    if head.event is None:
        yield "  these cannot be read as a document; --json has them in base64"
        return
    text = json.dumps(head.event, indent=2, ensure_ascii=False)
    yield from text[:most].split("\n")
    if most is not None and len(text) > most:
        yield f"... and {len(text) - most} characters more"
