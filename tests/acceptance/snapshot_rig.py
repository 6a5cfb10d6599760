"""A bridge that copies collections while they are written, listeners and workers that are killed, and the judgement."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Self
from uuid import uuid4

import bson
from bson import ObjectId, Timestamp
from pymongo import DeleteOne, MongoClient, ReplaceOne, UpdateOne
from pymongo.collection import Collection

from mongo_celery.mongo.oplog import operation_time
from tests.acceptance import copies
from tests.acceptance.copies import Copied
from tests.chaos.reading import updated
from tests.fixtures.mongo import empty
from tests.fixtures.process import Processes, ProjectProcess, wait_for

Document = dict[str, Any]

APP = "tests.acceptance.snapshot_project"
PLAIN, FENCED, TRANSACTIONAL, LOOKED_UP = "plain", "fenced", "transactional", "looked_up"
SHARES = {PLAIN: 1.0, FENCED: 0.02, TRANSACTIONAL: 0.005, LOOKED_UP: 0.02}
"""How many documents a collection has, in relation to the first: a fenced insert is a transaction, as each of a
transactional handler's changes is."""

OPTIONS: Document = {
    "partitions": 4,
    "lease_ttl": 2,
    "claim_ttl": 2,
    "dispatch_grace": 1.5,
    "commit_grace": 1,
    "transaction_seconds": 2,
    "max_crashes": 1000,
}
_LEAST = 60
_BATCH = 40
_POPULATED_AT_ONCE = 10_000
_PROBES = tuple(f"probe-{number}" for number in range(12))
"""So many that each of four partitions has some: a writer would outrun those without."""
_QUIET = ("--without-gossip", "--without-mingle", "--without-heartbeat")
_EPOCH = datetime(2020, 1, 1, tzinfo=UTC)


_IDS: tuple[Callable[[int], Any], ...] = (
    lambda number: number,
    lambda number: f"key-{number}",
    lambda number: ObjectId(f"{number:024x}"),
    lambda number: {"number": number, "of": ["a", number]},
    lambda number: number + 0.5,
    lambda number: number.to_bytes(8, "big"),
    lambda number: _EPOCH + timedelta(minutes=number),
)
"""Of many types, since a comparison with one value finds its own type only."""


def id_of(number: int) -> Any:
    """The `_id` of a document; the first one has the least value that there is but one."""
    return _IDS[number % len(_IDS)](number) if number else None


class Writer:
    """
    Writes to one collection as fast as the machine goes, with no more than two batches on their way.

    Args:
        source: what is written.
        copy: what its handler writes to; the probes in it tell how far that is.
        count: how many documents there are at first.
        batch: how many keys are written at once.
        chance: for the order of keys, and what is done to them.

    Attributes:
        written: how many writes there were, deletes included.
        deleted: how many of them.
    """

    def __init__(
        self, source: Collection[Document], copy: Collection[Document], count: int, batch: int, chance: random.Random
    ) -> None:
        self.written = self.deleted = 0
        self.failure: BaseException | None = None
        self._source = source
        self._copy = copy
        self._count = count
        self._batch = batch
        self._chance = chance
        self._numbers = dict.fromkeys(range(count), 1)
        self._gone: set[int] = set()
        self._probed = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"writer of {source.name}", daemon=True)

    def populate(self) -> None:
        """Write the documents that exist before."""
        for first in range(0, self._count, _POPULATED_AT_ONCE):
            numbers = range(first, min(first + _POPULATED_AT_ONCE, self._count))
            self._source.insert_many([{"_id": id_of(number), **_fields(1)} for number in numbers], ordered=False)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def rest(self) -> None:
        """Write no more, from the next batch on."""
        self._stopping.set()

    def stop(self) -> None:
        """Write no more; fails the test if writing has failed."""
        self.rest()
        if self._thread.ident is not None:
            self._thread.join()
        if self.failure is not None:
            raise self.failure

    @property
    def keys_gone(self) -> list[Any]:
        """The `_id` of all that was deleted, and is not there."""
        return [id_of(number) for number in self._gone]

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._write_batch()
                wait_for(lambda: self._stopping.is_set() or self._arrived(), message=f"{self._thread.name} goes on")
        except BaseException as error:  # noqa: BLE001 - raised where it is asked for
            self.failure = error

    def _write_batch(self) -> None:
        """Each key at most once, so that the order within the batch is free."""
        chosen = {self._chance.randrange(self._count + self._count // 10) for _ in range(self._batch)}
        self._probed += 1
        probes = [ReplaceOne({"_id": key}, {"_id": key, **_fields(self._probed)}, upsert=True) for key in _PROBES]
        self._source.bulk_write([*map(self._request, sorted(chosen)), *probes], ordered=False)
        self.written += len(chosen) + len(probes)

    def _request(self, number: int) -> DeleteOne | ReplaceOne[Document] | UpdateOne:
        n = self._numbers[number] = self._numbers.get(number, 0) + 1
        key = {"_id": id_of(number)}
        lives = n > 1 and number not in self._gone
        if lives and self._chance.random() < 0.3:
            self._gone.add(number)
            self.deleted += 1
            return DeleteOne(key)
        self._gone.discard(number)
        if lives and self._chance.random() < 0.5:
            return UpdateOne(key, {"$set": _fields(n)})
        return ReplaceOne(key, {**key, **_fields(n)}, upsert=True)

    def _arrived(self) -> bool:
        """Whether the batch before the last one has."""
        wanted = {"_id": {"$in": _PROBES}, "n": {"$gte": self._probed - 1}}
        return self._probed < 2 or self._copy.count_documents(wanted) == len(_PROBES)


class CopiesRig:
    """
    Sources, copies, and the bridge between them: a context manager.

    Args:
        client: of the set that has all of it.
        url: of that set.
        broker: URL of the broker.
        processes: starts and ends the processes.
        documents: of the largest collection.
        run_size: of all handlers that work in runs.
        seed: for everything that is left to chance.

    Attributes:
        kills: how many processes were killed.
        counts: how many documents each collection has at first.
        writers: of each collection.
    """

    def __init__(
        self,
        client: MongoClient[Document],
        url: str,
        broker: str,
        processes: Processes,
        *,
        documents: int,
        run_size: int,
        seed: int = 1,
    ) -> None:
        names = f"copies_{uuid4().hex[:10]}"
        self.state = client[f"{names}_state"]
        self.data, self.copies = client[f"{names}_data"], client[f"{names}_copies"]
        self.kills = 0
        self._client = client
        self.chance = random.Random(seed)
        self._processes = processes
        self._roles: dict[str, ProjectProcess] = {}
        self._environment = {
            "COPIES_MONGO": url,
            "COPIES_BROKER": broker,
            "COPIES_NAMES": names,
            "COPIES_OPTIONS": json.dumps({**OPTIONS, "run_size": run_size}),
        }
        self.counts = {name: max(int(documents * share), _LEAST) for name, share in SHARES.items()}
        self.writers = {
            name: Writer(
                self.data[name],
                self.copies[name],
                count,
                2 * run_size if name == PLAIN else _BATCH,
                random.Random(f"{seed}/{name}"),
            )
            for name, count in self.counts.items()
        }

    def __enter__(self) -> Self:
        for name, writer in self.writers.items():
            self.copies.create_collection(name)  # else a transaction would have to
            writer.populate()
        self._since: Timestamp = operation_time(self._client)
        return self

    def __exit__(self, *error: object) -> None:
        for writer in self.writers.values():
            if writer.failure is None:
                writer.stop()
        self._processes.__exit__()
        for database in (self.data, self.copies, self.state):
            empty(self._client, database)

    # -- processes ---------------------------------------------------------------------------------

    def start(self, *, listeners: int = 1, workers: int = 1) -> None:
        """Start processes, all at once, and wait until they work."""
        for number in range(workers):
            self._begin(f"worker-{number}")
        for number in range(listeners):
            self._begin(f"listener-{number}")
        for name, process in self._roles.items():
            process.wait_for_output(r" ready\." if name.startswith("worker") else "reading from|standing by")

    def _begin(self, name: str) -> None:
        arguments = ["listener"] if name.startswith("listener") else ["worker", "-c", "2", "-n", f"{name}@%h", *_QUIET]
        self._roles[name] = self._processes.celery(
            APP, *arguments, "-l", "INFO", name=name, environment=self._environment
        )

    def kill_leader(self) -> None:
        """Kill the listener that leads, and start another."""
        lease = self.state["leases"].find_one({"_id": "copies"}) or {}
        listeners = [name for name in self._roles if name.startswith("listener")]
        self._kill(next((name for name in listeners if self._roles[name].pid == lease.get("pid")), listeners[0]))

    def kill_worker(self) -> None:
        """Kill a worker with all its processes, and start another."""
        self._kill(self.chance.choice([name for name in self._roles if name.startswith("worker")]))

    def _kill(self, name: str) -> None:
        self.kills += 1
        process = self._roles[name]
        process.killed = True
        self._processes.release(process, grace=0)
        self._begin(name)

    def kill_any(self) -> None:
        """Kill one or the other."""
        self.chance.choice([self.kill_leader, self.kill_worker])()

    def changes(self, *arguments: str) -> None:
        """Run `celery -A APP changes ...` to its end."""
        done = self._processes.celery(APP, "changes", *arguments, name="command", environment=self._environment)
        assert done.wait() == 0, done.text

    # -- the snapshots -----------------------------------------------------------------------------

    @property
    def snapshots(self) -> dict[str, Document]:
        """The stored snapshots, by their handlers."""
        return {found["_id"].split("/")[1]: found for found in self.state["snapshots"].find()}

    @property
    def all_done(self) -> bool:
        """Whether each handler has had its snapshot."""
        found = self.snapshots
        return all(found.get(name, {}).get("state") == "done" for name in SHARES)

    def progress(self, *names: str) -> int:
        """How many documents the snapshots of these handlers, or of all, have delivered."""
        return sum(found.get("done", 0) for name, found in self.snapshots.items() if not names or name in names)

    def wait_progress(self, *names: str) -> None:
        """Wait until such snapshots have gone on, or all are done; what has its own is not written any more."""
        before = self.progress(*names)

        def gone_on() -> bool:
            for name, found in self.snapshots.items():
                if found["state"] == "done":
                    self.writers[name].rest()
            return self.all_done or self.progress(*names) > before

        wait_for(gone_on, message=lambda: f"the snapshots go on: {self.snapshots}")

    def settle(self) -> None:
        """Stop writing, and wait until everything that was written is done."""
        for writer in self.writers.values():
            writer.stop()
        last = operation_time(self._client)
        behind = {"clusterTime": {"$not": {"$gte": last}}}

        def left() -> list[str]:
            return [found["_id"] for found in self.state["handlers"].find(behind, {"_id": 1})]

        wait_for(lambda: not left(), message=lambda: f"behind: {left()}")
        stored, marked = self.state["backlog"], {"spilled": {"$ne": None}}  # which the watermark has passed
        wait_for(
            lambda: not stored.count_documents({}) and not self.state["partitions"].count_documents(marked),
            message=lambda: f"{stored.count_documents({})} stored",
        )

    # -- judging -----------------------------------------------------------------------------------

    def judge(self) -> None:
        """Assert that all was delivered, nothing went back, and the copies are equal to their sources."""
        found = [
            *self._undelivered(),
            *copies.went_back(self._history(FENCED)),
            *copies.went_back(self._history(TRANSACTIONAL), repeats=False),
        ]
        for name in (FENCED, TRANSACTIONAL, LOOKED_UP):
            source, copy = _plain(self.data[name]), _plain(self.copies[name])
            found += [f"{name}: {each}" for each in copies.different(source, copy)]
        assert not found, f"{len(found)} after {self.kills} kills:\n" + "\n".join(found[:20])

    def _undelivered(self) -> Iterator[str]:
        """Of the handler that only notes; a document that is gone had a delete, whatever came of it before."""
        noted = {_key(each): each for each in self.copies[PLAIN].find()}
        owed: dict[str, float] = {_key(each): each["n"] for each in self.data[PLAIN].find({}, {"n": 1})}
        owed.update({_key({"_id": key}): 0.5 for key in self.writers[PLAIN].keys_gone})
        yield from copies.undelivered(owed, {key: each["n"] for key, each in noted.items()})
        yield from copies.too_often({key: each.get("read", 0) for key, each in noted.items()}, self.kills)

    def _history(self, name: str) -> Iterator[Copied]:
        """The writes to a copy, as the oplog has them."""
        documents: dict[str, Document] = {}
        end = self.copies[name].insert_one({"_id": "end"}).inserted_id
        with self.copies[name].watch(start_at_operation_time=self._since) as stream:
            for event in stream:
                if "documentKey" not in event:
                    continue
                if event["documentKey"]["_id"] == end:
                    break
                key = _key(event["documentKey"])
                if event["operationType"] == "delete":
                    documents.pop(key, None)
                    yield Copied(key, None)
                    continue
                if event["operationType"] == "update":
                    documents[key] = updated(documents[key], event["updateDescription"])
                else:
                    documents[key] = event["fullDocument"]
                yield Copied(key, documents[key]["n"], **documents[key]["place"])
        self.copies[name].delete_one({"_id": end})


def _fields(n: int) -> Document:
    """What a write gives all fields but `_id`: none is as before, so an update names them all."""
    return {"n": n, "text": f"{n} {uuid4().hex}"}


def _key(document: Mapping[str, Any]) -> str:
    """Two values of one `_id` are told apart by their bytes."""
    return bson.encode({"_id": document["_id"]}).hex()


def _plain(collection: Collection[Document]) -> dict[str, bytes]:
    """All documents, by key, without what copies have beside."""
    return {
        _key(each): bson.encode({name: each[name] for name in sorted(each)})
        for each in collection.find({}, {"place": 0, "_fence": 0})
    }
