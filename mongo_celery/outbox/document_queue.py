"""What a dispatcher has to do: documents that wait for their turn, and those that are done later."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bson import ObjectId

from mongo_celery.mongo.repeating import Pauses
from mongo_celery.outbox.delivery import HeldDocument, PublishedPart

QUEUE_MAX = 1000
"""Documents; more than are published before a claim of some seconds lapses would be claimed in vain."""

TURN = 50
"""Documents that are taken from the queue at once; those to be looked at are claimed by one command."""

_LATER = Pauses(first=1.0, longest=10.0)
"""Before a document is asked for again that MongoDB did not answer for in time."""


@dataclass(slots=True)
class QueuedDocument:
    """A document in the queue: held with its entries, or to be looked at, and who waits for it."""

    document_id: Any
    held: HeldDocument | None = None
    owners: tuple[ObjectId, ...] = ()
    waiting: list[threading.Event] = field(default_factory=list)

    @property
    def all_owners(self) -> tuple[ObjectId, ...]:
        """Of every claim that this process may have on it."""
        return self.owners if self.held is None else (*self.owners, self.held.owner)


class DocumentQueue:
    """Documents in the order of their turns, each of them once. Its user has a lock around each use."""

    def __init__(self) -> None:
        self._documents: OrderedDict[Hashable, QueuedDocument] = OrderedDict()

    def __len__(self) -> int:
        return len(self._documents)

    @property
    def is_full(self) -> bool:
        """Whether writes are to claim nothing."""
        return len(self._documents) >= QUEUE_MAX

    @property
    def is_urgent(self) -> bool:
        """Whether somebody waits, or there is enough for a turn."""
        return len(self._documents) >= TURN or any(queued.waiting for queued in self._documents.values())

    def join(self, key: Hashable, queued: QueuedDocument) -> bool:
        """Add to a document that is there; what is added behind its entries is found when these are removed."""
        there = self._documents.get(key)
        if there is None:
            return False
        if queued.held is not None:
            there.owners, there.held = there.all_owners, None
        there.owners = (*there.owners, *queued.all_owners)
        there.waiting += queued.waiting
        return True

    def append(self, key: Hashable, queued: QueuedDocument) -> None:
        """Add a document that is not there."""
        self._documents[key] = queued

    def look_at(self, key: Hashable, document_id: object, owners: tuple[ObjectId, ...] = ()) -> None:
        """Have a document looked at after all others, also beyond the bound."""
        there = self._documents.setdefault(key, QueuedDocument(document_id))
        there.owners += owners

    def take(self) -> list[QueuedDocument]:
        """Those whose turn it is."""
        return [self._documents.popitem(last=False)[1] for _ in range(min(TURN, len(self._documents)))]

    def take_all(self) -> list[QueuedDocument]:
        """All of them."""
        documents, self._documents = list(self._documents.values()), OrderedDict()
        return documents


@dataclass(slots=True)
class LateDocument:
    """What MongoDB did not answer for in time: what has been published, to be removed, or what is to be looked at."""

    at: float
    times: int = 0
    parts: list[PublishedPart] = field(default_factory=list)
    look: QueuedDocument | None = None


class LateDocuments:
    """Documents that are asked for again, with growing pauses. Its user has a lock around each use."""

    def __init__(self) -> None:
        self._late: dict[Hashable, LateDocument] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._late

    @property
    def all(self) -> Sequence[LateDocument]:
        """In no order."""
        return list(self._late.values())

    def put_off(
        self, key: Hashable, times: int = 0, *, part: PublishedPart | None = None, look: QueuedDocument | None = None
    ) -> None:
        """Ask for a document later that was asked for so many times."""
        late = self._late.setdefault(key, LateDocument(0.0))
        late.times = max(late.times, times)
        late.at = time.monotonic() + _LATER.nth(late.times)
        late.parts += [part] if part is not None else []
        late.look = look or late.look

    def wait_for_removal(self, key: Hashable, look: QueuedDocument) -> bool:
        """Have a document looked at when what was published of it is removed; False if nothing is to be removed."""
        late = self._late.get(key)
        if late is None or not late.parts:
            return False
        if late.look is not None:
            look.owners = (*late.look.owners, *look.owners)
        late.look = look
        return True

    def put_back(self, key: Hashable, look: QueuedDocument) -> bool:
        """Have a document looked at when it is there again; False if it is not there."""
        there = self._late.get(key)
        if there is not None:
            there.look = look
        return there is not None

    def take_one(self, now: float) -> tuple[Hashable, LateDocument] | None:
        """One whose time has come."""
        key = next((each for each, late in self._late.items() if late.at <= now), None)
        return None if key is None else (key, self._late.pop(key))

    def take_all(self) -> Sequence[LateDocument]:
        """All of them."""
        late, self._late = self.all, {}
        return late
