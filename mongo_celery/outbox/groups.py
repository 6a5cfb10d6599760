"""Which documents that are held are published together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from mongo_celery.outbox.delivery import HeldDocument
from mongo_celery.outbox.failures import attempts_of

ENTRIES_MAX = 50
"""Entries of one document before the next has its turn."""

_MESSAGES_MAX = 100
_BYTES_MAX = 2**20
"""So much at most is in a group, of whole documents."""

_SEVERAL = ("celery.group", "celery.chord")
"""Names of entries that are several messages: Celery has more to do for them than to publish."""


def groups_of(documents: Iterable[HeldDocument]) -> Iterator[Sequence[HeldDocument]]:
    """Documents as they come, in groups that may be published together; one that may not is alone."""
    group, messages, size = list[HeldDocument](), 0, 0
    for held in documents:
        its_size = size_together(held)
        its_messages = min(len(held.events), ENTRIES_MAX)
        is_full = messages + its_messages > _MESSAGES_MAX or size + (its_size or 0) > _BYTES_MAX
        if group and (is_full or its_size is None):
            yield group
            group, messages, size = [], 0, 0
        if its_size is None:
            yield [held]
            continue
        group.append(held)
        messages, size = messages + its_messages, size + its_size
    if group:
        yield group


def size_together(held: HeldDocument) -> int | None:
    """Bytes of a document's next entries; None if one of them goes by itself, or has failed before."""
    size = 0
    for stored in held.events[:ENTRIES_MAX]:
        if not isinstance(stored, Mapping) or stored.get("name") in _SEVERAL or attempts_of(stored):
            return None
        payload = stored.get("payload")
        size += _bytes_of(payload) if isinstance(payload, (str, bytes)) else 0
    return size


def _bytes_of(text: str | bytes) -> int:
    return len(text) if isinstance(text, bytes) or text.isascii() else len(text.encode(errors="surrogatepass"))
