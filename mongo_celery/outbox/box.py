"""What the body of a transaction is to send: gathered in memory, and inserted just before the commit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from celery.canvas import Signature

from mongo_celery.errors import OutboxRefusedError
from mongo_celery.outbox.entries import Entry
from mongo_celery.outbox.events import Event
from mongo_celery.outbox.parcels import key_text

MakeEntries = Callable[[Sequence[object], Sequence[Event], str | None], list[Entry]]
"""Entries of tasks and events, for a key."""


class Contents:
    """
    All that one transaction is to send, by key, in the order in which it was added.

    Attributes:
        entries: by key.
        serialized: keys whose transactions are to follow each other.
    """

    def __init__(self) -> None:
        self.entries: dict[str | None, list[Entry]] = {}
        self.serialized: set[str] = set()
        self._lock = threading.Lock()

    def add(self, key: str | None, entries: Sequence[Entry], *, serialize: bool) -> None:
        """Add entries under a key; any thread may."""
        with self._lock:
            self.entries.setdefault(key, []).extend(entries)
            if serialize and key is not None:
                self.serialized.add(key)


class Box:
    """
    Takes what is to follow a transaction: of `OutboxCollection.collect`.

    Whatever the app sends in the body is put in by itself; `add` is for what is no single task (groups, chords), for
    events, and for another key. With the end of the block the box is closed: what is sent into it later is refused.

    Args:
        contents: of the transaction.
        make: makes entries.
        key: under which is added what is given none.
        serialize: whether transactions of that key are to follow each other.
    """

    def __init__(self, contents: Contents, make: MakeEntries, key: str | None, *, serialize: bool) -> None:
        self._contents = contents
        self._make = make
        self._key = key
        self._serialize = serialize
        self._closed = False

    def add(
        self,
        tasks: Sequence[object] = (),
        events: Sequence[Event] = (),
        *,
        key: object = None,
    ) -> None:
        """
        Add tasks and events to what is sent if the transaction is committed.

        Args:
            tasks: signatures, chains, groups, chords; no result backend is asked for them.
            events: events.
            key: of what their order is that of the commits; by default the block's.

        Raises:
            OutboxRefusedError: something cannot be stored, or the block has ended; nothing was added.
        """
        chosen = self._key if key is None else key_text(key)
        self._refuse_if_closed()
        entries = self._make(tasks, events, chosen)
        self._contents.add(chosen, entries, serialize=self._serialize and chosen == self._key)

    def take(self, signature: Signature) -> None:
        """Add one task that the body sends."""
        self._refuse_if_closed(signature.task)
        self.add([signature])

    def close(self) -> None:
        """Take nothing more."""
        self._closed = True

    def _refuse_if_closed(self, name: Any = "this") -> None:
        if self._closed:
            raise OutboxRefusedError(
                f"{name} is sent by something that was started in a transaction's body and has outlived it, so it can "
                "no longer go with the commit; wait for it inside the body, or start it in a context of its own.",
            )
