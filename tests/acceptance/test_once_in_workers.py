"""`once` in real workers that die, stand still and receive duplicates: chains and chords get their arguments."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from bson import ObjectId
from celery import Celery, chain, chord
from pymongo import MongoClient
from pymongo.database import Database

from mongo_celery import Outbox
from tests.fixtures.process import Processes, ProjectProcess, wait_for
from tests.fixtures.tasks import register_tasks
from tests.rig.project import MakeProject, Project

Document = dict[str, Any]


class Shop(Project):
    """The project's databases, and a writer whose chains are delivered by a sweep."""

    app = "tests.acceptance.tasks_project"

    def __init__(self, processes: Processes, client: MongoClient[Document], url: str, broker: str) -> None:
        super().__init__(processes, client, url, broker)
        self.writer = Celery("writer", broker=broker, backend=broker)
        register_tasks(self.writer, *(f"{self.app}.{name}" for name in ("charge", "charge_in_transaction", "book")))
        self.outbox = Outbox(
            self.writer, self.data["orders"], database=self.state.name, at_once=False, sweep_every=None
        )

    def task(self, name: str, *args: object, **options: Any) -> Any:
        return self.writer.signature(f"{self.app}.{name}", args=args, options=options)

    def notes(self, step: str) -> list[Document]:
        return list(self.data["notes"].find({"step": step}, {"_id": 0, "step": 0}))


@pytest.fixture
def project(make_project: MakeProject) -> Iterator[Shop]:
    made: Shop = make_project(Shop)
    yield made
    made.outbox.runtime.publisher.close()
    made.writer.backend.result_consumer._pubsub = None  # type: ignore[attr-defined] # results that are collected when Redis has gone would complain


@pytest.fixture(autouse=True)
def worker(project: Shop) -> ProjectProcess:
    return project.worker(concurrency=3)


@pytest.mark.parametrize("first", ["charge", "charge_in_transaction"])
def test_a_chain_whose_step_died_after_its_work_goes_on_with_the_remembered_result(project: Shop, first: str) -> None:
    """The redelivered step does not run again, and the next one gets the argument that it needs."""
    steps = chain(project.task(first, 7), project.task("book", 7))
    project.outbox.insert_one({"_id": 1}, tasks=[steps])
    project.outbox.sweep(older_than=0)

    wait_for(lambda: project.notes("book"))
    assert project.notes("book") == [{"order": 7, "charged": {"charge": 70}, "retries": 0}]
    assert project.notes("charge") == [{"order": 7, "retries": 0}]
    assert project.data["deaths"].count_documents({}) >= 1


@pytest.mark.needs_mongodb(5, 0)
def test_a_duplicate_waits_for_a_dead_run_however_long_and_uses_up_no_retries(project: Shop) -> None:
    """Celery's limit of three retries is for failures: here more than three waits are needed."""
    until = {"$dateAdd": {"startDate": "$$NOW", "unit": "second", "amount": 6}}
    running = [{"$set": {"state": "running", "owner": ObjectId(), "until": until}}]
    project.data["done"].update_one({"_id": "t1"}, running, upsert=True)
    project.task("wait_for_the_dead", task_id="t1").apply_async()

    wait_for(lambda: project.notes("waited"))
    assert project.notes("waited") == [{"retries": 0}]


def test_a_chord_whose_parts_are_delivered_twice_gets_each_part_once(project: Shop, worker: ProjectProcess) -> None:
    """The duplicate of a finished part counts as that part, and one of a running part is no part of its own."""
    header = [project.task("part", "quick"), project.task("part", "slow")]
    total = project.task("total")
    parts: Any = chord(header, total).apply_async().parent
    wait_for(lambda: len(project.notes("part")) == 2)
    for index, (part, sent) in enumerate(zip(header, parts.children, strict=True)):
        part.apply_async(task_id=sent.id, group_id=parts.id, group_index=index, chord=total)
    worker.wait_for_output("running in another process")
    wait_for(lambda: len(re.findall(r"part\[\S+\] succeeded", worker.text)) == 2)
    assert project.notes("total") == [], "the quick part has ended twice, which is not both parts"
    project.data["signs"].insert_one({})

    wait_for(lambda: project.notes("total"))
    assert [sorted(each["parts"]) for each in project.notes("total")] == [["quick", "slow"]]
    assert len(project.notes("part")) == 2


@pytest.mark.slow
def test_two_runs_of_a_frozen_process_are_excluded_by_a_session_alone(project: Shop, worker: ProjectProcess) -> None:
    """A claim lapses beside a process that stands still; a transaction has one winner, whoever wakes when."""
    database = project.data
    database.create_collection("standing")
    project.task("stand_still", task_id="t1").apply_async()
    (frozen,) = wait_for(lambda: project.notes("stand_still"))
    os.kill(frozen["pid"], signal.SIGSTOP)
    project.task("stand_still", task_id="t1").apply_async()
    wait_for(lambda: len(project.notes("stand_still")) == 2)
    os.kill(frozen["pid"], signal.SIGCONT)

    project.task("stand_still_in_transaction", task_id="t2").apply_async()
    standing = wait_for(lambda: database["standing"].find_one({}))
    os.kill(standing["pid"], signal.SIGSTOP)
    aborted = _aborted_transactions(database)
    database["signs"].insert_one({})  # the first two can go as well
    worker.wait_for_output("'t1' may have run twice")
    project.task("stand_still_in_transaction", task_id="t2").apply_async()
    wait_for(lambda: _aborted_transactions(database) > aborted + 2)
    os.kill(standing["pid"], signal.SIGCONT)

    wait_for(lambda: len(re.findall(r"stand_still_in_transaction\[t2\] succeeded", worker.text)) == 2)
    assert len(project.notes("stand_still_in_transaction")) == 1


def _aborted_transactions(database: Database[Document]) -> int:
    aborted: int = database.client.admin.command("serverStatus")["transactions"]["totalAborted"]
    return aborted
