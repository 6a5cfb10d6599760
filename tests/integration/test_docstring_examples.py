"""The examples in the docstrings of transactions, as they are written there."""

from __future__ import annotations

import inspect
import re
import textwrap
from typing import Any

from celery import Celery
from pymongo import MongoClient
from pymongo.database import Database

from mongo_celery import TwoPhaseCommit, transactional
from mongo_celery.errors import TransactionTimeoutError

Document = dict[str, Any]


def run_example(documented: object, database: Database[Document]) -> dict[str, Any]:
    """Run the code of a docstring, with the test's database in place of the one that it names."""
    found = re.search(r"::\n\n((?:(?: {4}.*)?\n)+)", inspect.getdoc(documented) or "")
    assert found is not None
    code = re.sub(r"client\.(bank|shop)\b", f"client[{database.name!r}]", textwrap.dedent(found[1]))
    client: MongoClient[Document] = database.client
    app = Celery("shop", broker="memory://", set_as_current=False)
    names = {"app": app, "client": client, "TransactionTimeoutError": TransactionTimeoutError}
    names |= {"TwoPhaseCommit": TwoPhaseCommit, "transactional": transactional}
    exec(compile(code, "docstring", "exec"), names)
    return names


def test_the_example_of_two_phase_commit_moves_an_amount_once(database: Database[Document]) -> None:
    database["accounts"].insert_many([{"_id": "A", "balance": 500}, {"_id": "B", "balance": 0}])
    bank = run_example(TwoPhaseCommit, database)["bank"]
    bank.transfer("A", "B", 100, id="payment 7")
    assert [each["balance"] for each in database["accounts"].find().sort("_id")] == [400, 100]
    assert bank.read("payment 7").state == "done"


def test_the_example_of_transactional_books_a_seat(database: Database[Document]) -> None:
    database["seats"].insert_many([{"_id": each} for each in ("A1", "A2")])
    run_example(transactional, database)
    assert list(database["seats"].find().sort("_id")) == [{"_id": "A1", "taken": True}, {"_id": "A2"}]
