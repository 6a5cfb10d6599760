"""
An app with an outbox, and processes that write, sweep and die at a stated point.

Each document lists in `ns` what was written to it, in the order of the commits; each write carries one task
`effect` per number. The task keeps, per document, the numbers in the order of their first run, and repeats none. So
in the end both lists are equal, or something was lost, invented or overtaken.

`python -m tests.acceptance.outbox_project PROGRAM ...`: the functions in `PROGRAMS`. Their processes are forked from
one that has imported everything, so that a death costs milliseconds. With `PROJECT_KNOWS` the app accepts `NEW`.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

from celery import Celery
from celery.signals import after_task_publish, before_task_publish
from pymongo import MongoClient, monitoring
from pymongo.collection import Collection
from pymongo.errors import OperationFailure, PyMongoError

from mongo_celery import Outbox, OutboxCollection, transactional
from mongo_celery.outbox.sweep import SWEEP_TASK
from tests.fixtures.serializer import ACCEPTED

Document = dict[str, Any]

NAMES = os.environ.get("PROJECT_NAMES", "outbox_faults")
URL = os.environ.get("PROJECT_MONGO", "mongodb://localhost/")
BROKER = os.environ.get("PROJECT_BROKER", "memory://")
OPTIONS: Document = {**json.loads(os.environ.get("PROJECT_OPTIONS", "{}")), "database": f"{NAMES}_state"}

EFFECT = "effect"
EFFECTS, SWEEPS = "effects", "sweeps"
COMMANDS = {"insert", "update", "delete", "findAndModify", "commitTransaction"}
_INTERRUPTED = 11601
_TURNS_SECONDS_MAX = 60.0


def configured(broker: str, **conf: Any) -> Celery:
    """An app with the project's queues; effects and sweeps apart, so that one can be read without the other."""
    made = Celery("outbox_faults", broker=broker)
    made.conf.update(
        task_routes={EFFECT: {"queue": EFFECTS}, SWEEP_TASK: {"queue": SWEEPS}},
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        worker_prefetch_multiplier=1,
        worker_hijack_root_logger=False,
        **conf,
    )
    return made


app = configured(BROKER, broker_transport_options={"visibility_timeout": 2} if BROKER.startswith("redis") else {})


@cache
def _client(_pid: int) -> MongoClient[Document]:
    """One client a process, made after the fork."""
    return MongoClient(URL, event_listeners=[POINTS], appname="outbox-project")


def client() -> MongoClient[Document]:
    return _client(os.getpid())


def collection(name: str) -> Collection[Document]:
    return client()[f"{NAMES}_data"][name]


if "PROJECT_KNOWS" in os.environ:
    app.conf.accept_content = ACCEPTED
items = Outbox(app, lambda: collection("items"), name="items", **OPTIONS)
boxes = OutboxCollection(app, lambda: collection("boxes"), name="boxes", every_transaction=True, **OPTIONS)


@app.task(name=EFFECT, bind=True)
def effect(self: Any, key: str, n: object) -> None:
    """Have an effect once per task id; the numbers stay in the order of their first effect."""
    effects = collection("effects")
    # In two steps: an upsert with the second condition could not tell "has this id" from "was just created".
    _insist(lambda: effects.update_one({"_id": key}, {"$setOnInsert": {"ids": [], "ns": []}}, upsert=True))
    mine = {"_id": key, "ids": {"$ne": self.request.id}}
    _insist(lambda: effects.update_one(mine, {"$push": {"ids": self.request.id, "ns": n}}))


def _insist(write: Callable[[], object]) -> None:
    """A test that ends the sessions of processes that were killed ends those of a worker, too."""
    while True:
        try:
            write()
        except OperationFailure as error:
            if error.code != _INTERRUPTED:
                raise
        else:
            return


def say(line: str) -> None:
    """Write a line at once, whatever the process does next."""
    os.write(1, f"{line}\n".encode())


class Points(monitoring.CommandListener):
    """Counts what a process does to its servers, and sends it a signal at the n-th of these points."""

    def __init__(self) -> None:
        self.at = 0
        self.number = signal.SIGKILL
        self.said = ""
        self._count = 0

    def arm(self, at: int, number: signal.Signals, said: str) -> None:
        """From now on send the signal at this point, after having said which it is."""
        self._count, self.at, self.number, self.said = 0, at, number, said

    def pass_by(self, point: str) -> None:
        """One more; the signal comes before this returns."""
        self._count += 1
        if self._count == self.at:
            say(f"{self.said}|{point}")
            os.kill(os.getpid(), self.number)

    def started(self, event: monitoring.CommandStartedEvent) -> None:
        if event.command_name in COMMANDS:
            self.pass_by(f"before {event.command_name}")

    def succeeded(self, event: monitoring.CommandSucceededEvent) -> None:
        if event.command_name in COMMANDS:
            self.pass_by(f"after {event.command_name}")

    def failed(self, event: monitoring.CommandFailedEvent) -> None:
        """Nothing."""


POINTS = Points()


@before_task_publish.connect(weak=False, sender=EFFECT)
def _before_publish(**_arguments: Any) -> None:
    POINTS.pass_by("before publish")


@after_task_publish.connect(weak=False, sender=EFFECT)
def _after_publish(**_arguments: Any) -> None:
    POINTS.pass_by("after publish")


def listen_to_nothing() -> None:
    """From now on this process sends several messages by one command: who is told of each sends them one by one."""
    after_task_publish.disconnect(_after_publish, sender=EFFECT)


# -- one write of each kind: numbers 1 and 2 ---------------------------------------------------------


def both(key: str) -> list[Any]:
    return [effect.s(key, 1), effect.s(key, 2)]


_PUSH: Document = {"$push": {"ns": {"$each": [1, 2]}}}


def _transaction(key: str) -> None:
    def write(session: Any) -> None:
        items.insert_one({"_id": key, "ns": [1, 2]}, tasks=both(key), session=session)
        items.update_one({"_id": f"old {key}"}, _PUSH, tasks=both(f"old {key}"), session=session)

    transactional(client).run(write)


def _collected(key: str, **options: Any) -> None:
    def write(session: Any) -> None:
        collection("items").insert_one({"_id": key, "ns": [1, 2]}, session=session)
        effect.delay(key, 1)
        effect.delay(key, 2)

    transactional(client, **options).run(write)


KINDS: dict[str, Callable[[str], object]] = {
    "insert_one": lambda key: items.insert_one({"_id": key, "ns": [1, 2]}, tasks=both(key)),
    "update_one": lambda key: items.update_one({"_id": f"old {key}"}, _PUSH, tasks=both(f"old {key}")),
    "upsert": lambda key: items.update_one({"_id": key}, _PUSH, upsert=True, tasks=both(key)),
    "find_one_and_update": lambda key: items.find_one_and_update(
        {"_id": f"old {key}"}, _PUSH, tasks=both(f"old {key}")
    ),
    "insert_many": lambda key: items.insert_many([{"_id": key, "ns": [1, 2]}], tasks=both(key)),
    "transaction": _transaction,
    "collected": lambda key: _collected(key, outbox=boxes),
    "unnamed": _collected,
}
IN_BOXES = {"collected", "unnamed"}
POINTS_MAX = 30


def import_all() -> None:
    """Import what a first message needs, which is half of Celery: once, and not in each forked process."""
    app.finalize()
    with app.connection_for_write() as connection:
        assert all((app.amqp.queues, app.events, connection.transport))  # each imports when it is asked for


# -- programs ----------------------------------------------------------------------------------------


def fork(job: Callable[[], object]) -> int:
    """Run a job in a process of its own; its pid."""
    pid = os.fork()
    if pid:
        return pid
    try:
        job()
    except BaseException:  # noqa: BLE001 - a forked process ends here, whatever happens
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def wait_for_end(pid: int) -> int:
    """Exit status, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _at_each_point(said: str, job: Callable[[int], object], number: signal.Signals) -> Iterator[int]:
    """The pids of processes that get a signal at their first, second ... point."""
    for at in range(1, POINTS_MAX):

        def run(at: int = at) -> None:
            POINTS.arm(at, number, f"{said}|{at}")
            job(at)

        yield fork(run)


def write_and_deliver(kind: str, key: str) -> None:
    """Write, and let the dispatcher end its turns, however slow the machine is."""
    KINDS[kind](key)
    dispatcher = (boxes if kind in IN_BOXES else items).runtime.dispatcher
    changed = dispatcher._thread.changed
    with changed:
        assert changed.wait_for(lambda: dispatcher._is_done() and not dispatcher._polls, _TURNS_SECONDS_MAX)


def die_writing(*kinds: str) -> None:
    """Per kind, a writer that dies at its first point, one that dies at its second, until one lives."""
    for kind in kinds:
        for pid in _at_each_point(kind, lambda at, kind=kind: write_and_deliver(kind, f"{kind} {at}"), signal.SIGKILL):  # type: ignore[misc]
            status = wait_for_end(pid)
            if status == 0:
                break
            assert status == -signal.SIGKILL, f"a writer ended with {status}"
        else:
            raise AssertionError(f"{kind} has no end")


def die_sweeping(points: str) -> None:
    """Sweepers of two documents each that die at their first, second ... point."""

    def sweep_two(_at: int) -> None:
        items.runtime.sweeps.note(0.0)
        items.runtime.relay.deliver_all(items.runtime.find_due(2))

    sweepers = _at_each_point("sweep", sweep_two, signal.SIGKILL)
    for pid in itertools.islice(sweepers, int(points)):
        status = wait_for_end(pid)
        assert status in (0, -signal.SIGKILL), f"a sweeper ended with {status}"


def be_zombies(*keys: str) -> None:
    """Per document a relay that stops at another point; ends when all were continued and have ended."""
    relays = _at_each_point("zombie", lambda at: items.runtime.relay.deliver(keys[at - 1]), signal.SIGSTOP)
    # One after another: together they are slow, and a relay whose claim is old does not publish.
    pids = itertools.islice(relays, len(keys))
    stopped = [pid for pid in pids if os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])]
    say(f"stopped {len(stopped)} of {len(keys)}")
    statuses = [wait_for_end(pid) for pid in stopped]
    assert not any(statuses), statuses


def write(key: str, n: object, seconds: float = 40.0) -> None:
    """Write a number once, whatever it takes: the filter keeps a repetition from writing it again."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            items.update_one({"_id": key, "ns": {"$ne": n}}, {"$push": {"ns": n}}, tasks=[effect.s(key, n)])
        except PyMongoError:
            if time.monotonic() > deadline:
                raise
            threading.Event().wait(0.05)
        else:
            return


def load(name: str, count: str, *keys: str) -> None:
    for number in range(int(count)):
        for key in keys:
            write(key, f"{name}.{number}")


def web(environ: dict[str, Any], start_response: Callable[..., object]) -> Iterable[bytes]:
    """As WSGI, `POST /KEY?N` writes a number to a document. The answer is the process."""
    key, n = environ["PATH_INFO"].strip("/"), int(environ["QUERY_STRING"])
    items.update_one({"_id": key}, {"$push": {"ns": n}}, upsert=True, tasks=[effect.s(key, n)])
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [str(os.getpid()).encode()]


if "OUTBOX_BEFORE_FORK" in os.environ:  # as an application that a server loads before it forks
    items.insert_one({"_id": "before", "ns": [1]}, tasks=[effect.s("before", 1)])

PROGRAMS: dict[str, Callable[..., None]] = {
    "die-writing": die_writing,
    "die-sweeping": die_sweeping,
    "be-zombies": be_zombies,
    "load": load,
}

if __name__ == "__main__":
    import_all()
    PROGRAMS[sys.argv[1]](*sys.argv[2:])
