"""A reader of a change stream, and everything that it has handed over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from threading import Semaphore
from types import TracebackType
from typing import Any, Self

from bson import Timestamp
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient
from pymongo.monitoring import CommandListener

from mongo_celery.bridge.stream.cursor import Position
from mongo_celery.bridge.stream.filter import make_filter
from mongo_celery.bridge.stream.items import ChangeEvent, Failed, Item, ReadError
from mongo_celery.bridge.stream.reader import StreamReader, StreamStatus
from mongo_celery.bridge.stream.source import Scope, Selector, make_scope, parse_source
from mongo_celery.bridge.window import Mark
from mongo_celery.errors import MongoCeleryError
from mongo_celery.mongo.oplog import operation_time
from mongo_celery.mongo.repeating import Pauses
from tests.fixtures.process import PATIENCE_SECONDS, wait_for

APP_NAME = "reader-under-test"
SHORT_PAUSES = Pauses(first=0.1, longest=5.0, growth=1.5)


def selector_of(*targets: str, name: str = "record", **conditions: Any) -> Selector:
    wanted = make_filter(conditions.get("operations"), conditions.get("fields"), conditions.get("match"))
    return Selector(name, tuple(parse_source(target, None) for target in targets), wanted)


def scope_on(
    *targets: str,
    pipeline: Sequence[Mapping[str, Any]] = (),
    full_document: str | None = None,
    before_change: str | None = None,
    **conditions: Any,
) -> Scope:
    """The stream of a bridge with one handler, and with stages that make what a server might send."""
    scope = make_scope(
        [selector_of(*targets, **conditions)],
        state_database="state_of_nobody",
        full_document=full_document,
        before_change=before_change,
    )
    return replace(scope, last=tuple(pipeline))


def now(client: MongoClient[Any]) -> Position:
    time = operation_time(client)
    return Position(None, Timestamp(time.time, time.inc + 1))


class StreamReading:
    """
    Reads from a position until its `with` block ends.

    Args:
        room: batches that are taken before `room.release` is called; by default the reader never waits.
        pauses: before the stream is opened again.
        commands: is told all commands.
        status: of a reader before.
        comment: of the reader's commands.
    """

    def __init__(
        self,
        url: str,
        scope: Scope,
        position: Position,
        *,
        room: int | None = None,
        pauses: Pauses = SHORT_PAUSES,
        commands: CommandListener | None = None,
        status: StreamStatus | None = None,
        comment: Any = "a test",
    ) -> None:
        self.items: list[Item] = []
        self._url = url
        self.room = Semaphore(room) if room is not None else None
        self._listeners = [commands] if commands is not None else []
        self.reader = StreamReader(
            self._client,
            scope,
            position,
            deliver=self._take,
            comment=comment,
            pauses=pauses,
            status=status,
        )

    def _client(self, timeout: float) -> MongoClient[RawBSONDocument]:
        return MongoClient(
            self._url,
            document_class=RawBSONDocument,
            appname=APP_NAME,
            socketTimeoutMS=int(timeout * 1000),
            retryReads=False,
            event_listeners=self._listeners,
            heartbeatFrequencyMS=500,
        )

    def _take(self, items: Sequence[Item]) -> None:
        while self.room is not None and not self.room.acquire(timeout=0.05):
            if self.reader._stopping.is_set():
                return
        self.items += items

    def __enter__(self) -> Self:
        self.reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.reader.stop()
        self.reader._thread.join(PATIENCE_SECONDS)
        assert not self.reader._thread.is_alive(), "it ends"

    @property
    def events(self) -> list[Mapping[str, Any]]:
        return [item.document for item in self.items if isinstance(item, ChangeEvent)]

    @property
    def read_errors(self) -> dict[Any, ReadError]:
        """The read errors of the events that have one, by the `_id`s of their documents."""
        found = (item for item in self.items if isinstance(item, ChangeEvent) and item.read_error is not None)
        return {item.document["documentKey"]["_id"]: item.read_error for item in found if item.read_error is not None}

    @property
    def marks(self) -> list[Mark]:
        return [item for item in self.items if isinstance(item, Mark)]

    @property
    def keys(self) -> list[Any]:
        """The `_id`s of the changed documents, in the order of arrival."""
        return [event["documentKey"]["_id"] for event in self.events if "documentKey" in event]

    @property
    def operations(self) -> list[str]:
        return [event["operationType"] for event in self.events]

    def wait_for_keys(self, *keys: Any, seconds: float = PATIENCE_SECONDS) -> None:
        """Wait for these documents, each once, in this order, and nothing else."""
        wait_for(lambda: len(self.keys) >= len(keys), seconds, lambda: f"{keys}, but {self.keys} {self.failure}")
        assert self.keys == list(keys)

    @property
    def failure(self) -> MongoCeleryError | None:
        return next((item.error for item in self.items if isinstance(item, Failed)), None)

    def wait_for_failure(self, seconds: float = PATIENCE_SECONDS) -> MongoCeleryError:
        return wait_for(lambda: self.failure, seconds, "the stream ends for good")
