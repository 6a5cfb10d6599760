"""`once` in real workers that die, stand still and receive duplicates: chains and chords get their arguments."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
from bson import ObjectId
from celery import Celery, chain, chord
from pymongo import MongoClient
from pymongo.database import Database

from mongo_celery import Outbox
from tests.acceptance.chain_rig import QUIET
from tests.fixtures.mongo import empty
from tests.fixtures.process import Processes, ProjectProcess, wait_for

Document = dict[str, Any]

PROJECT = "tests.acceptance.once_project"
_CLAIM_SECONDS = 6


class Project:
    """A worker of the project, and its database."""

    def __init__(
        self, database: Database[Document], broker: str, worker: ProjectProcess, environment: dict[str, str]
    ) -> None:
        self.database = database
        self.worker = worker
        self.environment = environment
        self.app = Celery("writer", broker=broker, backend=broker)
        self.outbox = Outbox(self.app, database["orders"], at_once=False, sweep_every=None, foreign_tasks=True)

    def task(self, name: str, *args: object, **options: Any) -> Any:
        return self.app.signature(f"{PROJECT}.{name}", args=args, options=options)

    def notes(self, step: str) -> list[Document]:
        return list(self.database["notes"].find({"step": step}, {"_id": 0, "step": 0}))


def start_worker(processes: Processes, environment: dict[str, str], name: str) -> ProjectProcess:
    """A worker of the project that is ready."""
    worker = processes.celery(PROJECT, "worker", *QUIET, "-c", "3", "-l", "INFO", name=name, environment=environment)
    worker.wait_for_output("ready")
    return worker


@pytest.fixture
def project(
    processes: Processes, mongo_client: MongoClient[Document], mongo_url: str, redis_url: str
) -> Iterator[Project]:
    name = f"once_{uuid4().hex[:8]}"
    environment = {"ONCE_NAME": name, "ONCE_MONGO": mongo_url, "ONCE_BROKER": redis_url}
    worker = start_worker(processes, environment, "once")
    made = Project(mongo_client[name], redis_url, worker, environment)
    yield made
    made.outbox.publisher.close()
    made.app.backend.result_consumer._pubsub = None  # type: ignore[attr-defined] # results that are collected when Redis has gone would complain
    empty(mongo_client, name)


def test_a_run_that_a_soft_shutdown_cuts_is_made_up_for_once(project: Project, processes: Processes) -> None:
    """Its time is used up in the function: another worker runs it, and what comes after that is a duplicate."""
    task = project.task("stand_still", task_id="t1")
    task.apply_async()
    wait_for(lambda: project.notes("stand_still"))
    os.kill(project.worker.pid, signal.SIGQUIT)
    assert project.worker.wait() == 0, project.worker.text
    other = start_worker(processes, project.environment, "other")
    wait_for(lambda: len(project.notes("stand_still")) == 2)
    project.database["signs"].insert_one({})
    other.wait_for_output(r"stand_still\[t1\] succeeded")
    task.apply_async()
    wait_for(lambda: len(re.findall(r"stand_still\[t1\] succeeded", other.text)) == 2)
    assert len(project.notes("stand_still")) == 2


@pytest.mark.parametrize("first", ["charge", "charge_in_transaction"])
def test_a_chain_whose_step_died_after_its_work_goes_on_with_the_remembered_result(
    project: Project, first: str
) -> None:
    """The redelivered step does not run again, and the next one gets the argument that it needs."""
    steps = chain(project.task(first, 7), project.task("book", 7))
    project.outbox.insert_one({"_id": 1}, tasks=[steps])
    project.outbox.sweep(older_than=0)

    wait_for(lambda: project.notes("book"))
    assert project.notes("book") == [{"order": 7, "charged": {"charge": 70}, "retries": 0}]
    assert project.notes("charge") == [{"order": 7, "retries": 0}]
    assert project.database["deaths"].count_documents({}) >= 1


@pytest.mark.needs_mongodb(5, 0)
def test_a_duplicate_waits_for_a_dead_run_however_long_and_uses_up_no_retries(project: Project) -> None:
    """Celery's limit of three retries is for failures: here more than three waits are needed."""
    project.database["done"].insert_one({"_id": "t1", "state": "running", "owner": ObjectId(), "until": None})
    until = {"$dateAdd": {"startDate": "$$NOW", "unit": "second", "amount": _CLAIM_SECONDS}}
    project.database["done"].update_one({"_id": "t1"}, [{"$set": {"until": until}}])
    project.task("wait_for_the_dead", task_id="t1").apply_async()

    wait_for(lambda: project.notes("waited"))
    assert project.notes("waited") == [{"retries": 0}]


def test_a_chord_whose_parts_are_delivered_twice_gets_each_part_once(project: Project) -> None:
    """The duplicate of a finished part counts as that part, and one of a running part is no part of its own."""
    header = [project.task("part", "quick"), project.task("part", "slow")]
    total = project.task("total")
    parts: Any = chord(header, total).apply_async().parent
    wait_for(lambda: len(project.notes("part")) == 2)
    for index, (part, sent) in enumerate(zip(header, parts.children, strict=True)):
        part.apply_async(task_id=sent.id, group_id=parts.id, group_index=index, chord=total)
    project.worker.wait_for_output("running elsewhere")
    wait_for(lambda: len(re.findall(r"part\[\S+\] succeeded", project.worker.text)) == 2)
    assert project.notes("total") == [], "the quick part has ended twice, which is not both parts"
    project.database["signs"].insert_one({})

    wait_for(lambda: project.notes("total"))
    assert [sorted(each["parts"]) for each in project.notes("total")] == [["quick", "slow"]]
    assert len(project.notes("part")) == 2


def test_two_runs_of_a_frozen_process_are_excluded_by_a_session_alone(project: Project) -> None:
    """A claim lapses beside a process that stands still; a transaction has one winner, whoever wakes when."""
    database = project.database
    database.create_collection("standing")
    project.task("stand_still", task_id="t1").apply_async()
    (frozen,) = wait_for(lambda: project.notes("stand_still"))
    os.kill(frozen["pid"], signal.SIGSTOP)
    project.task("stand_still", task_id="t1").apply_async()
    wait_for(lambda: len(project.notes("stand_still")) == 2)
    os.kill(frozen["pid"], signal.SIGCONT)
    project.worker.wait_for_output("'t1' may run twice")

    project.task("stand_still_in_transaction", task_id="t2").apply_async()
    standing = wait_for(lambda: database["standing"].find_one({}))
    os.kill(standing["pid"], signal.SIGSTOP)
    aborted = _aborted_transactions(database)
    database["signs"].insert_one({})  # the first two can go as well
    project.task("stand_still_in_transaction", task_id="t2").apply_async()
    wait_for(lambda: _aborted_transactions(database) > aborted + 2)
    os.kill(standing["pid"], signal.SIGCONT)

    wait_for(lambda: len(re.findall(r"stand_still_in_transaction\[t2\] succeeded", project.worker.text)) == 2)
    assert len(project.notes("stand_still_in_transaction")) == 1


def _aborted_transactions(database: Database[Document]) -> int:
    aborted: int = database.client.admin.command("serverStatus")["transactions"]["totalAborted"]
    return aborted
