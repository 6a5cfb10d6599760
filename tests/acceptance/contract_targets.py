"""Targets that the contract suite examines: the package's own, that of the SQL example, and one that is broken."""

from __future__ import annotations

import os
import sqlite3
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import uuid4

from pymongo import MongoClient

from mongo_celery import Fence, FencedCollection

ROOT = Path(__file__).parents[2]
MONGODB = "CONTRACT_MONGODB"


class MongoTarget:
    """A fenced collection of MongoDB's."""

    def __init__(self) -> None:
        client: MongoClient[dict[str, Any]] = MongoClient(os.environ[MONGODB])
        self._totals = client["contract_targets"][f"totals_{uuid4().hex}"]
        self._totals.insert_one({})  # else each creation would have to create the collection

    def write(self, fence: Fence, key: str, value: int) -> None:
        FencedCollection(self._totals, fence).update_one({"_id": key}, {"$set": {"value": value}}, upsert=True)

    def read(self, key: str) -> int | None:
        found = self._totals.find_one({"_id": key})
        return int(found["value"]) if found else None


class SqlTarget:
    """The table of `examples/fenced_sql`, which has one fence for each partition."""

    def __init__(self) -> None:
        sys.path.insert(0, str(ROOT / "examples/fenced_sql"))
        import fenced_sql  # type: ignore[import-not-found]

        self._example = fenced_sql
        self._path = str(Path(tempfile.mkdtemp()) / "totals.db")
        with closing(sqlite3.connect(self._path)) as db:
            db.executescript(fenced_sql.SCHEMA)

    def write(self, fence: Fence, key: str, value: int) -> None:
        with closing(sqlite3.connect(self._path, timeout=60)) as db, db:
            self._example.pass_fence(db, fence)
            db.execute("INSERT OR REPLACE INTO totals VALUES (?, ?)", (key, value))

    def read(self, key: str) -> int | None:
        with closing(sqlite3.connect(self._path)) as db:
            found = db.execute("SELECT cents FROM totals WHERE customer = ?", (key,)).fetchone()
        return found[0] if found else None


class RacingTarget:
    """Compares tokens of all partitions with each other, which refuses the wrong ones."""

    def __init__(self) -> None:
        self._rows: dict[str, tuple[int, int]] = {}

    def write(self, fence: Fence, key: str, value: int) -> None:
        if self._rows.get(key, (0, 0))[0] > fence.token:
            raise fence.stale()
        self._rows[key] = fence.token, value

    def read(self, key: str) -> int | None:
        return self._rows[key][1] if key in self._rows else None
