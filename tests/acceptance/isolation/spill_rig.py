"""A bridge that stores changes, processes that end at a point of it, and the order of it all as the oplog has it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

import psutil  # type: ignore[import-untyped]
from pymongo import MongoClient
from pymongo.errors import PyMongoError

from mongo_celery.mongo.oplog import operation_time
from tests.acceptance.isolation.rolling_rig import Rolling
from tests.chaos.history import Due, Effect, Fact, Kept, Stored, Wrote, beyond_prefix, going_back, went_back
from tests.fixtures.process import ProjectProcess, wait_for

Document = dict[str, Any]

END = "end"


class SpillRig(Rolling):
    """
    A bridge whose processes end or stop themselves between two writes (`chain_project/points.py`).

    Whatever its layout: its changes are waited for by their effects.
    """

    def __enter__(self) -> Self:
        super().__enter__()
        self._since = operation_time(self.client)
        return self

    def spread(self, partitions: int) -> None:
        """Let all processes that start from now on have so many partitions."""
        self.partitions = partitions
        options = json.loads(self._environment["CHAIN_OPTIONS"])
        self._environment["CHAIN_OPTIONS"] = json.dumps({**options, "partitions": partitions})

    # -- processes that end, or stop ---------------------------------------------------------------

    def pointed(self, command: str, point: Mapping[str, Any]) -> ProjectProcess:
        """Start a listener or a worker that will come to a point, and wait until it has begun."""
        asked = json.dumps(point)
        if command == "worker":
            return self.worker(name="pointed", CHAIN_POINT=asked)
        return self.listener("pointed", CHAIN_POINT=asked)

    @property
    def is_at_point(self) -> bool:
        """Whether the process has come to its point."""
        return (self._gates / "point").exists()

    def wait_gone(self, process: ProjectProcess) -> None:
        """Wait until a process has come to its point, and has ended there if it is to end."""
        wait_for(lambda: self.is_at_point, message="it comes to its point")
        wait_for(lambda: not process.running or _is_stopped(process), message="it has ended, or stands still")

    # -- writing, and waiting ----------------------------------------------------------------------

    def write_around(self, handler: str, count: int, first: int = 1, **do: Any) -> None:
        """Write so many changes of some documents, in turns: two for each partition that there is at first."""
        for n in range(first, first + count):
            for number in range(2 * self.partitions):
                self.write(handler, f"around{number}", n, **do)

    def write_surely(self, handler: str, key: str, n: int) -> None:
        """Write one change, again and again until it is there: repeating it changes nothing."""

        def written() -> bool:
            with suppress(PyMongoError):
                self.write(handler, key, n)
                return True
            return False

        wait_for(written, message=f"{key} {n} is written")

    def behind(self, item: Due) -> set[Due]:
        """What is written in the partition of a change."""
        where = self.partition_of(item.handler, item.key)
        return {each for each in self.written if self.partition_of(each.handler, each.key) == where}

    def wait_effects(self, *, but: Iterable[Due] = ()) -> None:
        """Wait until all that was written has had its effect; some need not."""
        owed = set(self.written) - set(but)

        def left() -> set[Due]:
            return owed - {effect.due for effect in self.effects()}

        wait_for(lambda: not left(), message=lambda: f"without effect: {sorted(left())[:10]}")

    def wait_stored(self, item: Due) -> None:
        """Wait until the stored watermark has passed a change that stands, and all that is written behind it."""
        written = operation_time(self.client)
        passed = {"_id": f"chain/{item.handler}", "clusterTime": {"$gte": written}}
        wait_for(lambda: self.state["handlers"].count_documents(passed), message="the watermark passes it")

    def wait_removed(self) -> None:
        """Wait until nothing is stored any more, and no partition is marked."""
        marked = {"spilled": {"$ne": None}}
        partitions, stored = self.state["partitions"], self.state["backlog"]
        wait_for(
            lambda: not stored.count_documents({}) and not partitions.count_documents(marked),
            message=lambda: f"{stored.count_documents({})} stored, marked: {list(partitions.find(marked))}",
        )

    # -- judging -----------------------------------------------------------------------------------

    def judge_all(self, *, spare: int | None = None) -> list[Fact]:
        """As `judge`, with all positions: no watermark has passed what was neither done nor stored and marked."""
        self.judge(spare=spare)
        history = list(self._oplog())
        found = [*beyond_prefix(history), *going_back(history), *went_back(history)]
        assert not found, "\n".join(found)
        written = {Due(fact.handler or "", fact.key, fact.n) for fact in history if isinstance(fact, Wrote)}
        assert written == set(self.written)
        return history

    def _oplog(self) -> Iterator[Fact]:
        """All that was written, done, stored and passed, in one order."""
        end = self.data[END].insert_one({}).inserted_id
        wanted = [{"$match": {"ns.db": {"$in": [self.data.name, self.state.name]}}}]
        reading = _Reading()
        with self.client.watch(wanted, start_at_operation_time=self._since) as stream:
            for event in stream:
                if "documentKey" not in event:  # of a collection
                    continue
                if event["documentKey"]["_id"] == end:
                    return
                yield from reading.facts(event, of_state=event["ns"]["db"] == self.state.name)


class _Reading:
    """From events to facts: what is stored counts once it is marked, as for the watermark."""

    def __init__(self) -> None:
        self._stored: dict[str, set[str]] = {}
        self._marks: dict[str, str] = {}

    def facts(self, event: Document, *, of_state: bool) -> Iterator[Fact]:
        collection = event["ns"]["coll"]
        fields = event.get("fullDocument") or event.get("updateDescription", {}).get("updatedFields", {})
        where = str(event.get("documentKey", {}).get("_id"))
        if not of_state and collection == "sink":
            yield from _effects(fields)
        elif not of_state and "n" in fields:
            yield Wrote(where, fields["n"], event["_id"]["_data"], handler=collection)
        elif collection == "handlers":
            place = _value(fields, "resumeToken", "_data")
            if place:
                yield Stored(where, place, {}, where.partition("/")[2])
        elif collection == "backlog" and event["operationType"] == "insert":
            partition, _, place = where.rpartition("/")
            self._stored.setdefault(partition, set()).add(place)
            yield from self._kept(partition)
        elif collection == "partitions":
            mark = _value(fields, "spilled", "to")
            if mark:
                self._marks[where] = mark
                yield from self._kept(where)

    def _kept(self, partition: str) -> Iterator[Fact]:
        marked = {place for place in self._stored.get(partition, ()) if place <= self._marks.get(partition, "")}
        self._stored.setdefault(partition, set()).difference_update(marked)
        for place in marked:
            yield Kept(partition.split("/")[1], place)


def _is_stopped(process: ProjectProcess) -> bool:
    return bool(psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)


def _value(fields: Document, name: str, inner: str) -> str:
    """A part of an embedded document, which an update has replaced, or has changed alone."""
    found = fields.get(name)
    return str((found or {}).get(inner, "") if name in fields else fields.get(f"{name}.{inner}", ""))


def _effects(fields: Document) -> Iterator[Effect]:
    for path, value in fields.items():
        if path.partition(".")[0] == "effects":
            for each in value if isinstance(value, list) else [value]:
                yield Effect(handler=each["handler"], key=each["key"], n=each["n"])


def spill_rigs(client: MongoClient[Document], url: str, directory: Path) -> Iterator[Callable[..., SpillRig]]:
    """Give what makes such a bridge, with these handlers and options; they end together."""
    with ExitStack() as stack:

        def make(*handlers: str, environment: Mapping[str, str] | None = None, **options: Any) -> SpillRig:
            given = {"spill_after": 1, "run_size": 5, **options}
            return stack.enter_context(
                SpillRig(client, url, directory, handlers=handlers, options=given, environment=environment)
            )

        yield make
