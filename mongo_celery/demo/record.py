"""The writer's own record: one line for each acknowledged write, in a file, so independent of MongoDB."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from mongo_celery.demo.plan import Write, name_of
from mongo_celery.demo.setting import NAME_FROM_CUSTOMER, NAME_INTO_ORDER, SUMMARISE
from mongo_celery.demo.verdict import Copy, Written, WrittenOrder


def line(write: Write) -> bytes:
    """A write as a line of the record."""
    return json.dumps([write.key, write.number, write.customer]).encode() + b"\n"


class Record:
    """
    The record as it grows.

    Args:
        path: of the writer's file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._writes: list[Write] = []
        self._due: Counter[str] = Counter()

    @property
    def count(self) -> int:
        """How many writes were recorded so far."""
        return len(self._writes)

    @property
    def due(self) -> dict[str, int]:
        """How many changes each handler has to handle for the writes so far."""
        return {name: self._due[name] for name in (SUMMARISE, NAME_FROM_CUSTOMER, NAME_INTO_ORDER)}

    def read(self) -> None:
        """Take in what was added since the last call; an unfinished line waits."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for text in file:
                if not text.endswith(b"\n"):
                    break
                self._offset += len(text)
                self._add(Write(*json.loads(text)))

    def written(self) -> Written:
        """All of it, by key."""
        orders: dict[str, WrittenOrder] = {}
        customers: dict[str, tuple[Copy, ...]] = {}
        for write in self._writes:
            if write.customer is None:
                copy = (write.number, name_of(write.key, write.number))
                customers[write.key] = (*customers.get(write.key, ()), copy)
            else:
                before = orders[write.key].numbers if write.key in orders else ()
                orders[write.key] = WrittenOrder(write.customer, (*before, write.number))
        return Written(orders, customers)

    def _add(self, write: Write) -> None:
        self._writes.append(write)
        self._due[SUMMARISE if write.customer is not None else NAME_FROM_CUSTOMER] += 1
        if write.customer is not None and write.number == 0:
            self._due[NAME_INTO_ORDER] += 1
