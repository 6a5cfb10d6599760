"""The bank project's processes on a database of its own, and the judgement."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from pymongo import MongoClient
from pymongo.database import Database

from mongo_celery import TwoPhaseCommit
from tests.acceptance.bank_project import ACCOUNTS
from tests.fixtures.process import Processes, ProjectProcess

Document = dict[str, Any]
PROJECT = "tests.acceptance.bank_project"
UNFINISHED = {"state": {"$in": ["pending", "applied", "canceling"]}}
BALANCE = 100


class Bank:
    """The project's processes on a database of its own, and a coordinator in the test to judge by."""

    def __init__(self, processes: Processes, client: MongoClient[Document], url: str, broker: str) -> None:
        self.name = f"bank_{uuid4().hex[:8]}"
        self.database: Database[Document] = client[self.name]
        self.coordinator = TwoPhaseCommit(None, self.database["transactions"], application="bank", protocol="documents")
        self._processes = processes
        self.environment = {"BANK_NAME": self.name, "BANK_MONGO": url, "BANK_BROKER": broker}
        self.database["accounts"].insert_many(
            [{"_id": each, "balance": BALANCE, "pendingTransactions": []} for each in range(ACCOUNTS)]
        )

    def python(self, *arguments: object) -> ProjectProcess:
        return self._processes.python("bank", "-m", PROJECT, *map(str, arguments), environment=self.environment)

    def celery(self, *arguments: str, **environment: str) -> ProjectProcess:
        return self._processes.celery(PROJECT, *arguments, environment={**self.environment, **environment})

    def output(self, *arguments: str, status: int = 0) -> list[str]:
        """What a command prints."""
        command = self.celery(*arguments)
        assert command.wait() == status, command.text
        return [line for line in command.text.splitlines() if line]

    def state(self, identity: Any) -> str:
        return str(self.coordinator.read(identity).state)

    def balances(self) -> list[int]:
        return [each["balance"] for each in self.database["accounts"].find().sort("_id", 1)]

    def unfinished(self) -> int:
        return self.database["transactions"].count_documents(UNFINISHED)

    def judge(self) -> None:
        """Nothing is left, nobody is below zero, and every balance is what the transactions that are done say."""
        assert self.unfinished() == 0
        expected = [BALANCE] * ACCOUNTS
        for done in self.database["transactions"].find({"state": "done"}):
            expected[done["source"]] -= done["value"]
            expected[done["destination"]] += done["value"]
        assert self.balances() == expected
        assert sum(self.balances()) == BALANCE * ACCOUNTS
        assert min(self.balances()) >= 0
        assert self.database["accounts"].count_documents({"pendingTransactions": {"$ne": []}}) == 0
