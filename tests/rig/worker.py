"""One partition on real state, and a worker of this process: a test says what it runs, and what its handler does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from celery import Celery
from celery.exceptions import Ignore, SoftTimeLimitExceeded
from pymongo import MongoClient

from mongo_celery import Bridge, Change, Changes
from mongo_celery.bridge.operations import dead_letter_commands
from mongo_celery.bridge.operations.dead_letter_commands import DeadLetterResult, Found
from mongo_celery.bridge.state.dead_letters import DeadChange, ReplayRequest
from mongo_celery.bridge.state.schema import SCHEMA
from mongo_celery.bridge.worker.deferred import DeferredWrites
from mongo_celery.bridge.worker.envelope import Run
from mongo_celery.bridge.worker.execution import Execution
from mongo_celery.plan import Plan
from tests.fixtures.process import wait_for
from tests.rig.changes import BRIDGE, HANDLER, TERM, Document, make_run, make_run_of_keys, number_of, token
from tests.rig.partition import PartitionRig, make_partition

APP_NAME = "worker-under-test"
"""By which failpoints know the worker's own client."""

_TURNS = 50
Handle = Callable[[Changes], object]


class WantedError(Exception):
    """Raised by a handler that is to fail."""


@dataclass
class WorkerRig:
    """
    A partition, and a worker that runs what it is given.

    Attributes:
        handle: what the handler does with the changes that it is given; with one where it takes single changes.
        bad: keys whose handler fails.
        existing: numbers of the changes that a snapshot gives.
        calls: numbers of the changes of each call.
        retries: how often the first change of each call was retried before.
        started: key, number and fencing token of each change that was given.
        got: key and number of each change that was handled.
        patience: seconds for which an outcome is tried to be written.
    """

    rig: PartitionRig
    bridge: Bridge
    handle: Handle = bool
    bad: set[str] = field(default_factory=set)
    existing: set[int] = field(default_factory=set)
    calls: list[list[int]] = field(default_factory=list)
    retries: list[int] = field(default_factory=list)
    started: list[tuple[Any, int, int]] = field(default_factory=list)
    got: list[tuple[Any, int]] = field(default_factory=list)
    patience: float = 5.0

    # -- what there is -----------------------------------------------------------------------------

    @property
    def tokens(self) -> set[int]:
        return {token for _, _, token in self.started}

    @property
    def keys(self) -> frozenset[int]:
        return frozenset(each["hash"] % (1 << 64) for each in self.rig.document.get("parkedKeys", ()))

    @property
    def letters(self) -> list[tuple[Any, int, str]]:
        """Key, number and cause of each dead letter, in the order of the stream."""
        return [
            (each["change"]["documentKey"]["_id"], each["change"]["fullDocument"]["n"], each["cause"])
            for each in self.rig.letters.find(sort=[("_id", 1)])
        ]

    @property
    def requests(self) -> list[ReplayRequest]:
        return self.rig.store.replays.read()

    # -- what the worker does ----------------------------------------------------------------------

    def execute(self, run: Run) -> None:
        (handler,) = self.bridge.wiring.handlers
        execution = Execution(self.bridge.wiring, handler, run, self.patience, is_limited=True)
        execution.execute(self._call)

    def run(self, first: int, *keys: str, **fields: Any) -> None:
        self.execute(make_run_of_keys(first, *keys, existing=self.existing, **fields))

    def flow(self, *keys: str) -> None:
        """Have changes of these keys handled and committed, as a listener would send them, until all are passed."""
        first = self.rig.image.committed + 1
        last = first + len(keys) - 1
        while (done := self.rig.image.committed) < last:
            single, rest = self.rig.image.one_by_one_until, keys[done + 1 - first :]
            with self._ended():
                self.run(done + 1, *(rest[:1] if single > done else rest))
            self.rig.claims.commit(self.rig.where)
            assert self.rig.image.committed > done or self.rig.image.one_by_one_until > single, "each run gets on"

    def replay(self, request: ReplayRequest | None = None) -> None:
        """Have it replay what is asked for; the first by default."""
        asked, number = request or self.requests[0], self.rig.image.committed + 1
        self.execute(make_run(number, 1, dead_letter=asked.letter, starts=asked.starts, hashes=(asked.hash,)))

    def drain(self) -> None:
        """Replay until nothing is asked for any more, as a listener would have it done."""
        for _ in range(_TURNS):
            if not self.requests:
                return
            with self._ended():
                self.replay()
        raise AssertionError(f"they do not get on: {self.requests}")

    # -- what an operator does ---------------------------------------------------------------------

    def find(self, *numbers: int) -> Found:
        """Return dead letters as commands find them; all by default."""
        return dead_letter_commands.find(self.bridge.wiring, ids=[token(number)["_data"] for number in numbers])

    def ask(self, *numbers: int, dry_run: bool = False, over_newer: bool = False) -> Sequence[DeadLetterResult]:
        ids = [each.document_id for each in self.find(*numbers).letters]
        return _results(self.bridge.operations.replay_dead_letters(ids=ids, over_newer=over_newer), dry_run=dry_run)

    def request(self, letter: DeadChange, *, over_newer: bool = False) -> str:
        """Ask for the replay of one letter of a parked key, wherever that waits."""
        place = {"partitioning": 0, "partition": 0, "hash_": letter.parked or 0}
        return self.rig.store.replays.request(letter.document_id, **place, over_newer=over_newer)

    def discard(self, *numbers: int, dry_run: bool = False) -> Sequence[DeadLetterResult]:
        ids = [each.document_id for each in self.find(*numbers).letters]
        return _results(self.bridge.operations.discard_dead_letters(ids=ids), dry_run=dry_run)

    # -- the handler -------------------------------------------------------------------------------

    def handle_changes(self, changes: Changes) -> None:
        numbered = [(each.document_key.get("_id"), number_of(each)) for each in changes]
        self.calls.append([number for _, number in numbered])
        self.started += [(key, number, changes[0].fencing_token) for key, number in numbered]
        self.handle(changes)
        if any(key in self.bad for key, _ in numbered if isinstance(key, str)):
            raise WantedError("as asked")
        self.got += numbered

    def _call(self, given: Changes | Change, retries: int) -> None:
        self.retries.append(retries)
        (handler,) = self.bridge.handlers
        self.bridge.app.tasks[handler.task_name].run(given)

    @contextmanager
    def _ended(self) -> Iterator[None]:
        with suppress(Ignore, WantedError, SoftTimeLimitExceeded):
            yield


def fail_at(*bad: int, tells: bool = False) -> Handle:
    def handle(changes: Changes) -> None:
        for change in changes:
            if number_of(change) in bad:
                try:
                    raise WantedError("as asked")
                except WantedError as error:
                    if tells:
                        raise changes.failed_at(change) from error
                    raise

    return handle


@contextmanager
def worker_on(
    client: MongoClient[Document],
    url: str,
    database: str,
    *,
    single: bool = True,
    run_seconds: float = 60.0,
    **options: Any,
) -> Iterator[WorkerRig]:
    """Give a partition with nothing done, a lease and a handler that commands find, and a worker."""
    state, partitioning = client[database], {"term": 0, "partitions": 1, "key": "blake2b-64:_id"}
    rig = make_partition(client, database)
    state["leases"].insert_one({"_id": BRIDGE, "schemaVersion": SCHEMA, "term": TERM})
    state["handlers"].insert_one({"_id": f"{BRIDGE}/{HANDLER}", "handler": HANDLER, "partitioning": partitioning})
    app = Celery("worker", broker="memory://", set_as_current=False)
    bridge = Bridge(
        app,
        f"{url}{'&' if '?' in url else '?'}appName={APP_NAME}",
        name=BRIDGE,
        database=database,
        partitions=1,
        autodiscover=False,
        run_size=200,
        run_seconds=run_seconds,
    )
    made = WorkerRig(rig, bridge)

    def record(given: Any) -> None:
        made.handle_changes(Changes([given]) if single else given)

    register: Any = bridge.on_change if single else bridge.on_changes
    register("shop.orders", name=HANDLER, **options)(record)
    app.finalize()
    with closing(bridge.client):
        yield made
        wait_for(lambda: _end_pause(bridge.wiring.of_process(DeferredWrites)))  # without the client it logs an error


def _end_pause(deferred: DeferredWrites) -> bool:
    """End the pause before the next deferred write. Return True if no write is left."""
    with deferred._changed:
        deferred._changed.notify()
    return deferred._thread is None


Begin = Callable[..., WorkerRig]


@contextmanager
def worker_with(client: MongoClient[Document], url: str, database: str, **fixed: Any) -> Iterator[Begin]:
    """Give a function that makes a worker with more options, once a test."""
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(worker_on(client, url, database, **{**fixed, **options}))


def _results(plan: Plan, *, dry_run: bool) -> list[DeadLetterResult]:
    fields = plan.fields if dry_run else plan.run().fields
    return [DeadLetterResult(**each) for each in fields["parts"]]
