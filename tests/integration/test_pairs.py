"""
Two features in one program: every pair that a user can write is a row, and holds what it promises or is refused.

`python -m pytest tests/integration/test_pairs.py -k fenced-outbox` runs the rows of a pair. The rows are in modules
named after what meets: `pairs_bodies` (effects in one body), `pairs_effects` (in one document, or one behind the
other), `pairs_handler` (in a `transactional=True` handler), `pairs_ways` (effects in each way in which changes come),
`pairs_deliveries` (ways among themselves), and `pairs_atomic` (Django).
"""

from __future__ import annotations

import importlib
import json

import pytest
from pymongo import MongoClient
from pymongo.database import Database

from tests.fixtures.process import Processes
from tests.integration.pairs_rig import TABLE, Document, Row, Shop

MODULES = [
    f"tests.integration.pairs_{name}" for name in ("atomic", "bodies", "deliveries", "effects", "handler", "ways")
]
pytest.register_assert_rewrite(*MODULES)
for module in MODULES:
    importlib.import_module(module)
ROWS = [pytest.param(row, id=row.id) for row in TABLE.rows.values() if not row.needs_django]


@pytest.mark.parametrize("row", ROWS)
def test_pair(row: Row, mongo_url: str, mongo_client: MongoClient[Document]) -> None:
    with Shop(mongo_url, mongo_client, **row.options).open() as shop:
        row.program(shop)


def test_pairs_with_django(processes: Processes, database: Database[Document], mongo_url: str) -> None:
    """All in one process, which has Django's settings."""
    program = "from tests.integration.pairs_django import main; main()"
    environment = {"PAIRS_MONGO": mongo_url, "PAIRS_DATABASE": database.name}
    ended = processes.python("django", "-c", program, environment=environment)
    assert ended.wait() == 0, ended.text
    errors = json.loads(ended.text.splitlines()[-1])
    assert not errors, "\n".join(f"{row_id}: {TABLE.rows[row_id].promise}\n{text}" for row_id, text in errors.items())


def test_no_pair_is_left_out() -> None:
    assert TABLE.uncovered() == []
