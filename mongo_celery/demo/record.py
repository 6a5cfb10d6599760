"""The writer's own record: one line for each acknowledged write, in a file, so independent of MongoDB."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from mongo_celery.demo.plan import PlannedWrite
from mongo_celery.demo.setting import HANDLERS
from mongo_celery.demo.verdict import handled


def line(write: PlannedWrite) -> bytes:
    """A write as a line of the record."""
    return json.dumps([write.key, write.number, write.customer]).encode() + b"\n"


class Record:
    """
    The record as it grows.

    Args:
        path: of the writer's file.

    Attributes:
        writes: in the order of writing for each key.
        due: how many changes each handler has to handle for them.
    """

    def __init__(self, path: Path) -> None:
        self.writes: list[PlannedWrite] = []
        self.due = Counter(dict.fromkeys(HANDLERS, 0))
        self._path = path
        self._offset = 0

    def read(self) -> None:
        """Take in what was added since the last call; an unfinished line waits."""
        if not self._path.exists():
            return
        before = len(self.writes)
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for text in file:
                if not text.endswith(b"\n"):
                    break
                self._offset += len(text)
                self.writes.append(PlannedWrite(*json.loads(text)))
        self.due.update(str(due.handler) for due in handled(self.writes[before:]))
