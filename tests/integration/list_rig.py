"""One partition whose handler gets lists, on real state: runs by hand, and what is left of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import bson
from celery import Celery
from celery.exceptions import Ignore, SoftTimeLimitExceeded
from pymongo import MongoClient

from mongo_celery import Bridge, Change, Changes
from mongo_celery.bridge.operations import letter_commands
from mongo_celery.bridge.state.dead_letters import Letter, Selection
from mongo_celery.bridge.worker.envelope import Run
from mongo_celery.bridge.worker.execution import Execution
from tests.integration.parking_rig import WantedError, event_of_key, hash_of
from tests.integration.partition_rig import BRIDGE, SUBSCRIPTION, VERSION, Document, Rig, rig_of

Handle = Callable[[Changes], object]


def number_of(change: Change) -> int:
    """The number of a change, by its document."""
    assert change.full_document is not None
    return int(change.full_document["n"])


@dataclass
class Lists:
    """
    A partition, and a worker in this process.

    Attributes:
        handle: what the handler does with a list.
        calls: numbers of the changes of each list that it was given, and the attempts before.
        tokens: fencing tokens that it was given.
        is_limited: whether its messages have a time limit.
    """

    rig: Rig
    bridge: Bridge
    handle: Handle = bool
    calls: list[list[int]] = field(default_factory=list)
    retries: list[int] = field(default_factory=list)
    tokens: set[int] = field(default_factory=set)
    is_limited: bool = True

    @property
    def letters(self) -> list[tuple[int, str]]:
        """Number and cause of each dead letter, in the order of the stream."""
        found = self.rig.letters.find(sort=[("_id", 1)])
        return [(each["change"]["fullDocument"]["n"], each["cause"]) for each in found]

    @property
    def task(self) -> Any:
        """The handler's task."""
        (handler,) = self.bridge.handlers
        return self.bridge.app.tasks[handler.task_name]

    def run(self, first: int, *keys: str, exist: bool = False, **options: Any) -> None:
        """Let the worker have a run of changes of these keys, from this number on; or as a snapshot gives them."""
        numbers = range(first, first + len(keys))
        raws = tuple(bson.encode(event_of_key(n, key, exists=exist)) for n, key in zip(numbers, keys, strict=True))
        given = {"hash": hash_of(keys[0]), "hashes": tuple(map(hash_of, keys)), **options}
        run = Run(
            BRIDGE, SUBSCRIPTION, 0, 0, VERSION, first, first + len(keys) - 1, **{"changes": raws, **given}
        )  # fmt: skip
        self.execution(run).execute(self._call)

    def execution(self, run: Run) -> Execution:
        """What a worker makes of a run."""
        (handler,) = self.bridge.wiring.handlers
        return Execution(self.bridge.wiring, handler, run, 5, is_limited=self.is_limited)

    def flow(self, *keys: str) -> None:
        """Changes of these keys are all there is: what a listener would do until they are passed."""
        while (done := self.rig.image.committed) < len(keys):
            single = self.rig.image.single
            with suppress(Ignore, WantedError, SoftTimeLimitExceeded):
                self.run(done + 1, *keys[done : done + 1 if single > done else len(keys)])
            self.rig.claims.commit(self.rig.where)
            assert self.rig.image.committed > done or self.rig.image.single > single, "each run gets on"

    def replay(self) -> None:
        """Ask for the replay of the first dead letter, and let the worker have it."""
        self.bridge.operations.replay_dead_letters(limit=1).run()
        (asked,) = self.rig.store.replays.read()
        number = self.rig.image.committed + 1
        run = Run(BRIDGE, SUBSCRIPTION, 0, 0, VERSION, number, number, dead_letter=asked.letter, starts=asked.starts)
        self.execution(run).execute(self._call)

    def find(self) -> Sequence[Letter]:
        """All dead letters, as commands find them."""
        return letter_commands.find(self.bridge.wiring, Selection(), 0).letters

    def got(self, changes: Changes) -> None:
        """The handler."""
        self.calls.append([number_of(change) for change in changes])
        self.tokens |= {change.fencing_token for change in changes}
        self.handle(changes)

    def _call(self, given: Changes | Change, retries: int) -> None:
        self.retries.append(retries)
        self.task.run(given)


def failing(*bad: int, tells: bool = False) -> Handle:
    """A handler that fails on these numbers, and may say on which."""

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


Begin = Callable[..., Lists]


@contextmanager
def lists_on(
    client: MongoClient[Document],
    url: str,
    database: str,
    *,
    single: bool = False,
    run_seconds: float = 60.0,
    **options: Any,
) -> Iterator[Lists]:
    """A partition with nothing done, and a worker whose handler gets lists; with `single` one change at a time."""
    rig = rig_of(client, database)
    layout = {"term": 0, "partitions": 1, "key": "blake2b-64:_id"}
    client[database]["leases"].insert_one({"_id": BRIDGE, "schemaVersion": 1, "term": VERSION})
    client[database]["handlers"].insert_one(
        {"_id": f"{BRIDGE}/{SUBSCRIPTION}", "handler": SUBSCRIPTION, "partitioning": layout}
    )
    app = Celery("lists", broker="memory://", set_as_current=False)
    bridge = Bridge(
        app,
        url,
        name=BRIDGE,
        database=database,
        partitions=1,
        autodiscover=False,
        run_size=200,
        run_seconds=run_seconds,
    )
    made = Lists(rig, bridge)
    register: Any = bridge.on_change if single else bridge.on_changes

    def record(given: Any) -> None:
        made.got(Changes([given]) if single else given)

    register("shop.orders", name=SUBSCRIPTION, **{"failure_policy": "dead_letter", **options})(record)
    app.finalize()
    with closing(bridge.client):
        yield made


@contextmanager
def beginning(client: MongoClient[Document], url: str, database: str, **fixed: Any) -> Iterator[Begin]:
    """What makes such a partition and worker with more options, once a test; it ends with the block."""
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(lists_on(client, url, database, **fixed, **options))


def numbers(calls: Sequence[Sequence[int]]) -> list[int]:
    """All that was given, in order."""
    return [each for call in calls for each in call]
