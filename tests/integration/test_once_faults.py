"""`once` where MongoDB does not answer, a run takes long, or two runs meet: heartbeats and repetitions."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import Retry, SoftTimeLimitExceeded
from pymongo.collection import Collection
from pymongo.database import Database
from pymongo.errors import OperationFailure

from mongo_celery import once
from tests.fixtures.failpoint import Failpoint
from tests.fixtures.mongo import MakeClient
from tests.fixtures.process import wait_for

Document = dict[str, Any]

APP_NAME = "once-faults"


@pytest.fixture
def app() -> Iterator[Celery]:
    with Celery("once", broker="memory://", set_as_current=False) as made:
        yield made


@pytest.fixture
def marks(database: Database[Document], make_client: MakeClient) -> Collection[Document]:
    """The collection of marks, by a client that failpoints can tell from others; its index is made."""
    opened = make_client(appname=APP_NAME)[database.name]["done"]

    @once(opened, key=lambda: "warm")
    def warm() -> None: ...

    warm()
    return opened


def run(task: Any, task_id: str = "t1") -> Any:
    return task.apply(task_id=task_id, throw=True).result


def events(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.__dict__["event"] for each in caplog.records if "event" in each.__dict__]


def mark_of(marks: Collection[Document]) -> Document:
    return marks.find_one({"_id": "t1"}) or {}


def hold(marks: Collection[Document], seconds: float) -> None:
    """A run of somebody else, which is claimed for so long, or was so long ago."""
    marks.replace_one({"_id": "t1"}, {"state": "running", "owner": 1}, upsert=True)
    marks.update_one({"_id": "t1"}, [{"$set": {"until": {"$add": ["$$NOW", round(seconds * 1000)]}}}])


def test_a_run_keeps_its_mark_for_as_long_as_it_takes(
    app: Celery, marks: Collection[Document], failpoint: Failpoint, caplog: pytest.LogCaptureFixture
) -> None:
    """It is renewed beyond its first time, also after MongoDB has refused one renewal."""

    @app.task(shared=False)
    @once(marks, claim_ttl=1)
    def long() -> None:
        first = mark_of(marks)["until"]
        with failpoint(failCommands=["update"], appName=APP_NAME, errorCode=13):
            wait_for(lambda: "mark_renewal_failed" in events(caplog))
        wait_for(lambda: (mark_of(marks)["until"] - first).total_seconds() > 1)

    run(long)
    assert mark_of(marks)["state"] == "done"
    assert set(events(caplog)) == {"mark_renewal_failed"}


def test_a_run_that_was_taken_over_says_so_and_leaves_the_mark_to_the_other(
    app: Celery, marks: Collection[Document], caplog: pytest.LogCaptureFixture
) -> None:
    """A process that stood still cannot be kept from this without a transaction; its result is its own."""
    fails = [LookupError()]

    @app.task(shared=False)
    @once(marks, claim_ttl=3600)
    def short() -> str:
        hold(marks, 3600)
        if fails:
            raise fails.pop()
        return "mine"

    with pytest.raises(LookupError):
        run(short)
    assert events(caplog) == ["mark_lost"]
    marks.delete_one({"_id": "t1"})
    assert run(short) == "mine"
    assert events(caplog) == ["mark_lost", "mark_lost"]
    assert mark_of(marks).items() >= {"state": "running", "owner": 1}.items()


def test_a_failover_between_claim_and_mark_costs_nothing(
    app: Celery, marks: Collection[Document], failpoint: Failpoint
) -> None:
    """Claim and mark are repeated until they are answered; the function is not."""
    runs: list[int] = []

    @app.task(shared=False)
    @once(marks)
    def send() -> str:
        runs.append(1)
        return "sent"

    unanswered = {"appName": APP_NAME, "closeConnection": True, "mode": {"times": 3}}
    with failpoint(failCommands=["findAndModify", "update"], **unanswered):
        assert run(send) == "sent"
    with failpoint(failCommands=["update"], **unanswered):
        assert run(send, "t2") == "sent"
    assert [run(send), run(send, "t2")] == ["sent", "sent"]
    assert runs == [1, 1]


def test_a_mark_that_cannot_be_written_is_logged_and_the_task_has_succeeded(
    app: Celery, marks: Collection[Document], failpoint: Failpoint, caplog: pytest.LogCaptureFixture
) -> None:
    """A failure would be retried, and what the function did with it. The claim keeps duplicates away until it ends."""

    @app.task(shared=False)
    @once(marks)
    def send() -> str:
        return "sent"

    with failpoint(failCommands=["update"], appName=APP_NAME, errorCode=13):
        assert run(send) == "sent"
    assert events(caplog) == ["mark_unwritten"]
    assert caplog.records[-1].levelno == logging.WARNING
    with pytest.raises(Retry):
        run(send)

    with failpoint(failCommands=["findAndModify"], appName=APP_NAME, errorCode=13), pytest.raises(OperationFailure):
        run(send, "t2")


def test_a_soft_time_limit_passes_whatever_it_interrupts(app: Celery, marks: Collection[Document]) -> None:
    """It is Celery's, and no fault of a result that is being encoded."""

    class Interrupted:
        def __json__(self) -> str:
            raise SoftTimeLimitExceeded

    @app.task(shared=False)
    @once(marks)
    def send() -> Interrupted:
        return Interrupted()

    with pytest.raises(SoftTimeLimitExceeded):
        run(send)


@pytest.mark.parametrize("held", [3600, -1])
def test_a_task_that_has_got_a_session_meets_marks_from_before(
    app: Celery, marks: Collection[Document], held: float
) -> None:
    """A deploy that adds the parameter finds runs without: a live one is waited for, a dead one is taken over."""

    @app.task(shared=False)
    @once(marks)
    def pay(*, session: Any) -> None:
        marks.database["effects"].insert_one({"_id": 1}, session=session)

    marks.database.create_collection("effects")
    hold(marks, held)
    if held > 0:
        with pytest.raises(Retry):
            run(pay)
    else:
        run(pay)
        run(pay)
    assert marks.database["effects"].count_documents({}) == (0 if held > 0 else 1)


def test_of_two_runs_with_a_session_one_commits(app: Celery, marks: Collection[Document]) -> None:
    """A run that stands still keeps its mark by its transaction; the other one waits, and has its result."""
    begun, go, bodies = threading.Event(), threading.Event(), list[str]()

    @app.task(shared=False)
    @once(marks)
    def pay(*, session: Any) -> int:
        bodies.append("run")
        marks.database["effects"].insert_one({}, session=session)
        begun.set()
        assert go.wait(60)
        return len(bodies)

    marks.database.create_collection("effects")
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(run, pay)
        assert begun.wait(60)
        second = pool.submit(run, pay)
        go.set()
        assert [first.result(60), second.result(60)] == [1, 1]
    assert (marks.database["effects"].count_documents({}), bodies) == (1, ["run"])
