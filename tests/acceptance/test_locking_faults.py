"""Locks under faults: Celery workers that retry or die inside a transaction."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any, Self

import pytest
from celery import Celery
from pymongo import MongoClient
from pymongo.database import Database
from pymongo.errors import OperationFailure

from mongo_celery.embedded import MongoReplicaSet
from mongo_celery.locking import select_for_update, transactional
from tests.acceptance.documentation.pages import blocks
from tests.fixtures.process import ROOT, Processes, wait_for
from tests.integration.locking_rig import Document, held
from tests.rig.project import MakeProject, Project

PROJECT = "tests.acceptance.tasks_project"
LIFETIME_SECONDS = 2
FREE_SECONDS_MAX = 60
"""Generous: the server looks twice in a transaction's lifetime."""

MakeReplicaSet = Callable[..., MongoReplicaSet]
MakeClient = Callable[..., MongoClient[Document]]


class Bank(Project):
    """The account that the tasks lock, and their worker."""

    app = PROJECT

    def __enter__(self) -> Self:
        self.sender = Celery("sender", broker=self.environment["PROJECT_BROKER"], set_as_current=False)
        self.data["accounts"].insert_one({"_id": 1, "entries": []})
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        self.sender.close()
        super().__exit__()

    def add(self, text: str, **options: Any) -> None:
        self.sender.send_task(f"{PROJECT}.add", (text,), options)

    def runs(self, text: str) -> list[Document]:
        return list(self.data["runs"].find({"text": text}))

    @property
    def entries(self) -> list[str]:
        document = self.data["accounts"].find_one({"_id": 1})
        assert document is not None
        return list(document["entries"])


def test_celery_sees_no_conflict_and_repeats_other_errors(make_project: MakeProject) -> None:
    """A conflict is repeated inside one run of the task, although `autoretry_for` names every error there is."""
    bank: Bank = make_project(Bank)
    bank.worker()
    with held(bank.data["accounts"], 1):
        bank.add("conflict")
        wait_for(lambda: len(bank.runs("conflict")) > 2, message="repeated bodies")
        assert bank.entries == []
    wait_for(lambda: bank.entries == ["conflict"])
    assert {run["retries"] for run in bank.runs("conflict")} == {0}

    bank.add("error", failures=2)
    wait_for(lambda: bank.entries == ["conflict", "error"])
    assert sorted(run["retries"] for run in bank.runs("error")) == [0, 1, 2]


def test_a_worker_that_is_killed_inside_blocks_for_the_servers_time_and_its_task_takes_effect_once(
    processes: Processes, make_replica_set: MakeReplicaSet, make_client: MakeClient, redis_url: str
) -> None:
    """The task comes back to another process, which waits for the dead one's lock; then others get on as well."""
    server = make_replica_set(parameters=[f"transactionLifetimeLimitSeconds={LIFETIME_SECONDS}"])
    with Bank(processes, make_client(server.url), server.url, redis_url) as bank:
        bank.worker(concurrency=1)
        bank.add("killed", linger=True)
        lingering = wait_for(lambda: [run for run in bank.runs("killed") if run.get("lingers")])
        os.kill(lingering[-1]["pid"], signal.SIGKILL)
        bank.add("after")
        wait_for(lambda: len(bank.entries) == 2, FREE_SECONDS_MAX)
        assert sorted(bank.entries) == ["after", "killed"]
        assert len({run["pid"] for run in bank.runs("killed")}) == 2


def test_the_query_of_the_docs_shows_a_holder_and_its_end_frees_the_document(
    database: Database[Document], make_client: MakeClient
) -> None:
    """Both are for people: nothing here ends another process's transaction."""
    (shown,) = [each.code for each in blocks(ROOT / "docs" / "transactions.md", "python") if "$currentOp" in each.code]
    database["things"].insert_one({"_id": 1})
    holder = make_client(appName=f"holder of {database.name}")
    lock = transactional(database.client)(select_for_update)

    def end_holder() -> None:
        found: list[tuple[Any, ...]] = []
        exec(shown, {"client": database.client, "print": lambda *values: found.append(values)})
        (session,) = [identity for identity, _, name, _ in found if name == f"holder of {database.name}"]
        database.client.admin.command("killSessions", [{"id": session}])
        assert lock(database["things"], {"_id": 1}, nowait=True)["_id"] == 1

    with pytest.raises(OperationFailure), held(holder[database.name]["things"], 1):
        end_holder()
