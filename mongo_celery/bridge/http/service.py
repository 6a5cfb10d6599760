"""
The routes beside the listeners of one process. All are read-only.

| path | answer |
|---|---|
| `/healthz` | 503 if the loop of a listener hangs. It asks no server |
| `/readyz` | 503 unless each listener leads or stands by, and its MongoDB answers |
| `/verdict` | 503 if a bridge is failing: for an alarm |
| `/metrics` | for Prometheus |
| `/`, `/status` | the page, and the snapshots as JSON |

The threads of the server read MongoDB, each value once a second at most. The listeners do not wait for them.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from itertools import chain
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import pymongo
from pymongo.errors import PyMongoError

from mongo_celery.bridge.http.page import POLICY, render_page
from mongo_celery.bridge.http.server import HttpServer, Response
from mongo_celery.bridge.operations.bridge_snapshot import EXIT_CODES, BridgeSnapshot, Workers, unreadable
from mongo_celery.bridge.operations.snapshot_reader import read_snapshot
from mongo_celery.bridge.wiring import BRIDGES, Wiring
from mongo_celery.broker.workers import ask_for_queues
from mongo_celery.command_line import CommandLine
from mongo_celery.errors import MongoCeleryError
from mongo_celery.mongo.redaction import short, without_credentials
from mongo_celery.outbox.registry import OUTBOXES
from mongo_celery.quantities import duration
from mongo_celery.twophase.twophase import TWO_PHASE_COMMITS, TwoPhaseCommit

if TYPE_CHECKING:
    from celery import Celery

    from mongo_celery.bridge.listener.activity import Activity

T = TypeVar("T")

ANSWER_SECONDS = 3.0
"""Time for MongoDB to answer an HTTP request."""

_OLD_SECONDS = 5.0
_ASK_SECONDS = 1.0
_KEEP_WORKERS_SECONDS, _KEEP_OTHERS_SECONDS = 15.0, 5.0


class Recent(Generic[T]):
    """
    A value that is read once in `keep` seconds at most, by a thread that asks for it.

    Others get the value before. If that is older by some seconds, they wait.
    """

    def __init__(self, read: Callable[[], T], keep: float = 1.0) -> None:
        self._read = read
        self._keep = keep
        self._lock = threading.Lock()
        self._value: T
        self._at = float("-inf")

    def __call__(self) -> T:
        """Return the value."""
        age = time.monotonic() - self._at
        if age > self._keep and self._lock.acquire(blocking=age > self._keep + _OLD_SECONDS):
            try:
                if time.monotonic() - self._at > self._keep:
                    with pymongo.timeout(ANSWER_SECONDS):
                        self._value = self._read()
                    self._at = time.monotonic()
            finally:
                self._lock.release()
        return self._value


class HttpService(HttpServer):
    """
    HTTP beside the listeners of one process.

    Raises:
        ConfigurationError: the address cannot be served.
    """

    def __init__(self, app: Celery, activities: Sequence[Activity], address: str, app_argument: object) -> None:
        wirings = BRIDGES.named(app, [each.bridge for each in activities])
        program = app_argument if isinstance(app_argument, str) else "APP"
        self._activities = activities
        self._errors = [Recent(partial(_find_error, each)) for each in wirings]
        self._snapshots = [Recent(partial(_read, each, CommandLine(program, each.line.bridge))) for each in wirings]
        self._workers = [Recent(partial(_count_workers, each), _KEEP_WORKERS_SECONDS) for each in wirings]
        parts = [*OUTBOXES.of(app), *TWO_PHASE_COMMITS.of(app)]
        self._others = Recent(lambda: [_describe(each) for each in parts], _KEEP_OTHERS_SECONDS)
        self._routes: dict[str, Callable[[str], Response]] = {
            "/": self._page,
            "/status": self._status,
            "/verdict": self._verdict,
            "/readyz": self._readiness,
            "/healthz": self._health,
            "/metrics": _make_exposition(app, activities, lambda: _call_all(self._snapshots)),
        }
        super().__init__(address, self._answer)

    def _answer(self, path: str, accept: str) -> Response | None:
        route = self._routes.get(path)
        return None if route is None else route(accept)

    def _health(self, _accept: str) -> Response:
        bridges = [{"bridge": each.bridge, "alive": each.is_alive, "role": each.role} for each in self._activities]
        alive = all(each.is_alive for each in self._activities)
        return _as_json({"alive": alive, "bridges": bridges}, ok=alive)

    def _readiness(self, _accept: str) -> Response:
        bridges = [
            {"bridge": each.bridge, "ready": each.is_ready and error is None, "role": each.role, "error": error}
            for each, error in zip(self._activities, _call_all(self._errors), strict=True)
        ]
        ready = all(each["ready"] for each in bridges)
        return _as_json({"ready": ready, "bridges": bridges}, ok=ready)

    def _verdict(self, _accept: str) -> Response:
        snapshots = _call_all(self._snapshots)
        worst = max((each.verdict for each in snapshots), key=EXIT_CODES.__getitem__)
        names = ("bridge", "verdict", "note", "findings")
        bridges = [{name: shown[name] for name in names} for shown in map(BridgeSnapshot.plain, snapshots)]
        return _as_json({"verdict": worst, "bridges": bridges}, ok=worst != "failing")

    def _status(self, _accept: str) -> Response:
        process = {"host": socket.gethostname(), "pid": os.getpid()}
        return _as_json({"process": process, "bridges": [each.plain() for each in self._complete()]})

    def _page(self, _accept: str) -> Response:
        text = render_page(self._complete(), others=self._others(), host=socket.gethostname(), pid=os.getpid())
        return Response(text.encode(), "text/html; charset=utf-8", policy=POLICY)

    def _complete(self) -> list[BridgeSnapshot]:
        """Return the snapshots with the workers that answer."""
        found = _call_all([*self._snapshots, *self._workers])
        count = len(self._snapshots)
        return [replace(each, workers=workers) for each, workers in zip(found[:count], found[count:], strict=True)]


def _call_all(reads: Sequence[Callable[[], T]]) -> list[T]:
    """Call functions at the same time: a server that hangs does not delay what others know."""
    with ThreadPoolExecutor(max(len(reads), 1)) as threads:
        return list(threads.map(lambda read: read(), reads))


def _as_json(value: dict[str, Any], *, ok: bool = True) -> Response:
    status = HTTPStatus.OK if ok else HTTPStatus.SERVICE_UNAVAILABLE
    return Response(json.dumps(value).encode(), "application/json", status)


def _read(wiring: Wiring, line: CommandLine) -> BridgeSnapshot:
    try:
        return read_snapshot(wiring, line)
    except Exception as error:  # noqa: BLE001 - one bridge does not keep the others from an answer
        return unreadable(wiring.name, _explain(error))


def _find_error(wiring: Wiring) -> str | None:
    """Return why MongoDB does not answer."""
    try:
        wiring.reach()
    except Exception as error:  # noqa: BLE001 - as above
        return _explain(error)
    return None


def _explain(error: Exception) -> str:
    if isinstance(error, MongoCeleryError):
        return without_credentials(str(error))
    return f"MongoDB cannot be read: {type(error).__name__}: {short(error)}."


def _count_workers(wiring: Wiring) -> Workers | None:
    """Return the workers that answer; None where this broker cannot be asked."""
    try:
        found = ask_for_queues(wiring.app, _ASK_SECONDS)
    except Exception:  # noqa: BLE001 - every transport raises its own
        return None
    serving = sum(not queues.isdisjoint(wiring.queue_names) for queues in found.values())
    return Workers(answered=len(found), serving=serving, slots=None)


def _describe(part: Any) -> tuple[str, str]:
    """Return the name of an outbox or of a `TwoPhaseCommit`, and its state in words."""
    name = type(part).__name__
    try:
        name = part.name
        if isinstance(part, TwoPhaseCommit):
            states = [f"{each.count} {state}" for state, each in sorted(part.log.standing().items())]
            return name, ", ".join(states) or "all are final"
        found = part.status()
    except (PyMongoError, ValueError) as error:  # a URL that is none is a ValueError
        return name, short(error)
    late = "" if found.oldest_seconds is None else f", the oldest for {duration(found.oldest_seconds)}"
    return name, f"{found.pending} pending{late}, {found.failing} failing, {found.dead_letters} dead letters"


def _make_exposition(
    app: Celery, activities: Sequence[Activity], read: Callable[[], list[BridgeSnapshot]]
) -> Callable[[str], Response]:
    """Return the route of the metrics. Without prometheus-client it is a sentence."""
    try:
        from prometheus_client import ProcessCollector
        from prometheus_client.exposition import choose_encoder

        from mongo_celery.bridge.http.metrics import BridgeCollector
        from mongo_celery.outbox.prometheus import OutboxCollector
        from mongo_celery.twophase.prometheus import TransactionCollector
    except ImportError as error:
        missing = Response(f"There are no metrics: {error}.\n".encode(), status=HTTPStatus.NOT_IMPLEMENTED)
        return lambda _accept: missing
    collectors = [
        ProcessCollector(registry=None),
        BridgeCollector(activities, read),
        OutboxCollector(app, answer_seconds=ANSWER_SECONDS),
        TransactionCollector(app, answer_seconds=ANSWER_SECONDS),
    ]

    def expose(accept: str) -> Response:
        encode, content_type = choose_encoder(accept)
        found = chain(*_call_all([lambda each=each: list(each.collect()) for each in collectors]))
        return Response(encode(SimpleNamespace(collect=lambda: found)), content_type)

    return expose
