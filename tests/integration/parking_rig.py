"""One partition whose handler parks keys, on real state: runs and replays by hand, and what is left of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import bson
from celery import Celery
from celery.exceptions import Ignore
from pymongo import MongoClient

from mongo_celery import Bridge, Change
from mongo_celery.bridge.operations import letter_commands
from mongo_celery.bridge.operations.letter_commands import Found, LetterResult
from mongo_celery.bridge.partitioning import document_hash
from mongo_celery.bridge.state.dead_letters import Letter, ReplayRequest, Selection
from mongo_celery.bridge.worker.envelope import Run
from mongo_celery.bridge.worker.execution import Execution
from mongo_celery.plan import Plan
from tests.integration.partition_rig import BRIDGE, SUBSCRIPTION, VERSION, Document, Rig, rig_of, token

_TURNS = 50


def event_of_key(number: int, key: str, *, exists: bool = False) -> Document:
    """The event with this place in the stream, of a document; or of one that existed, as a snapshot gives it there."""
    data = token(number)["_data"]
    return {
        "_id": {"_data": f"{data:0<18}~1"} if exists else token(number),
        "operationType": "snapshot" if exists else "insert",
        "ns": {"db": "shop", "coll": "orders"},
        "documentKey": {"_id": key},
        "fullDocument": {"_id": key, "n": number},
    }


def hash_of(key: str) -> int:
    """The hash of a document's key."""
    return document_hash(event_of_key(0, key))


class WantedError(Exception):
    """What a handler raises that is to fail."""


@dataclass
class Parking:
    """
    A partition, and a worker in this process.

    Attributes:
        bad: keys whose handler fails.
        existing: numbers of the changes that a snapshot gives.
        got: key and number of each change for which the handler has succeeded, in order.
        started: the same of each start.
        during: called inside the handler.
    """

    rig: Rig
    bridge: Bridge
    bad: set[str] = field(default_factory=set)
    existing: set[int] = field(default_factory=set)
    got: list[tuple[str, int]] = field(default_factory=list)
    started: list[tuple[str, int, int]] = field(default_factory=list)
    during: Callable[[Change], object] = bool

    @property
    def keys(self) -> frozenset[int]:
        """The hashes of the keys that are parked."""
        return frozenset(each["hash"] % (1 << 64) for each in self.rig.document.get("parkedKeys", ()))

    @property
    def letters(self) -> list[tuple[str, int, str]]:
        """Key, number and cause of each dead letter, in the order of the stream."""
        found = self.rig.letters.find(sort=[("_id", 1)])
        return [
            (each["change"]["documentKey"]["_id"], each["change"]["fullDocument"]["n"], each["cause"]) for each in found
        ]

    @property
    def requests(self) -> list[ReplayRequest]:
        """What is asked for and has not failed."""
        return [each for each in self.rig.store.replays.read() if not each.failed]

    def run(self, first: int, *keys: str, **options: Any) -> None:
        """Let the worker have a run of changes of these keys, numbered from the first on."""
        numbers = range(first, first + len(keys))
        raws = tuple(
            bson.encode(event_of_key(n, key, exists=n in self.existing)) for n, key in zip(numbers, keys, strict=True)
        )
        run = Run(
            BRIDGE,
            SUBSCRIPTION,
            0,
            0,
            VERSION,
            first,
            first + len(keys) - 1,
            raws,
            **{"hash": hash_of(keys[0]), "hashes": tuple(map(hash_of, keys)), **options},
        )
        self._execute(run)

    def flow(self, *keys: str, upto: int | None = None) -> None:
        """Changes of these keys are in front of the partition: what a listener would do until they are passed."""
        first = self.rig.image.committed + 1
        last = first + len(keys) - 1 if upto is None else upto
        while (done := self.rig.image.committed) < last:
            with self._ended():
                self.run(done + 1, *keys[done + 1 - first :])
            self.rig.claims.commit(self.rig.where)
            assert self.rig.image.committed > done, "each run gets on"

    def replay(self, request: ReplayRequest | None = None) -> None:
        """Let the worker have a replay; the first that is asked for by default."""
        replay = request or self.requests[0]
        number = self.rig.image.committed + 1
        run = Run(
            BRIDGE, SUBSCRIPTION, 0, 0, VERSION, number, number, dead_letter=replay.letter, starts=replay.starts,
            hashes=(replay.hash,),
        )  # fmt: skip
        self._execute(run)

    def drain(self) -> None:
        """Replay what is asked for until nothing is, as a listener would have it done."""
        for _ in range(_TURNS):
            if not self.requests:
                return
            with self._ended():
                self.replay()
            failed = [each for each in self.rig.store.replays.read() if each.failed]
            self.rig.store.replays.withdraw(failed)
        raise AssertionError(f"they do not get on: {self.requests}")

    def find(self, *numbers: int) -> Found:
        """Dead letters, as commands find them; all by default."""
        ids = [token(number)["_data"] for number in numbers]
        return letter_commands.find(self.bridge.wiring, Selection(ids=ids), 0)

    def ask(self, *numbers: int, dry_run: bool = False, over_newer: bool = False) -> Sequence[LetterResult]:
        """The command that replays letters."""
        ids = [each.document_id for each in self.find(*numbers).letters]
        return _results(self.bridge.operations.replay_dead_letters(ids=ids, over_newer=over_newer), dry_run=dry_run)

    def request(self, letter: Letter, *, over_newer: bool = False) -> str:
        """Ask for the replay of one letter of a parked key, wherever that waits."""
        place = {"generation": 0, "partition": 0, "hash_": letter.parked or 0}
        return self.rig.store.replays.request(letter.document_id, **place, over_newer=over_newer)

    def discard(self, *numbers: int, dry_run: bool = False) -> Sequence[LetterResult]:
        """The command that discards letters."""
        ids = [each.document_id for each in self.find(*numbers).letters]
        return _results(self.bridge.operations.discard_dead_letters(ids=ids), dry_run=dry_run)

    def _execute(self, run: Run) -> None:
        (handler,) = self.bridge.wiring.handlers
        Execution(self.bridge.wiring, handler, run, patience=5).execute(self._handle)

    def _handle(self, change: Change, _retries: int) -> None:
        document = change.full_document
        assert document is not None
        self.started.append((document["_id"], document["n"], change.fencing_token))
        self.during(change)
        if document["_id"] in self.bad:
            raise WantedError("as asked")
        self.got.append((document["_id"], document["n"]))

    @contextmanager
    def _ended(self) -> Iterator[None]:
        with suppress(Ignore, WantedError):
            yield


@contextmanager
def parking_on(client: MongoClient[Document], url: str, database: str, **options: Any) -> Iterator[Parking]:
    """A partition with nothing done, a lease and a subscription that commands find, and a worker."""
    rig = rig_of(client, database)
    layout = {"term": 0, "partitions": 1, "key": "blake2b-64:_id"}
    client[database]["leases"].insert_one({"_id": BRIDGE, "schemaVersion": 1, "term": VERSION})
    client[database]["handlers"].insert_one(
        {"_id": f"{BRIDGE}/{SUBSCRIPTION}", "handler": SUBSCRIPTION, "partitioning": layout}
    )
    app = Celery("parking", broker="memory://", set_as_current=False)
    bridge = Bridge(app, url, name=BRIDGE, database=database, partitions=1, autodiscover=False)

    @bridge.on_change("shop.orders", name=SUBSCRIPTION, **{"failure_policy": "park_key", **options})
    def record(_change: Change) -> None:
        """Is not called."""

    app.finalize()
    with closing(bridge.client):
        yield Parking(rig, bridge)


def _results(plan: Plan, *, dry_run: bool) -> list[LetterResult]:
    fields = plan.fields if dry_run else plan.run().fields
    return [LetterResult(**each) for each in fields["letters"]]
