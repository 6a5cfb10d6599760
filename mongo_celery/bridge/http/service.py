"""
The routes of one process's HTTP service. All are read-only.

| path | answer |
|---|---|
| `/healthz` | 503 if the loop of a listener hangs. It queries no server |
| `/readyz` | 503 unless each listener leads or stands by, and its MongoDB answers |
| `/verdict` | 503 if a bridge is failing, for alarms |
| `/metrics` | for Prometheus |
| `/`, `/status` | the page, and the snapshots as JSON |

The server's threads read MongoDB: each value at most once a second, and less often if reading takes long. The listeners
do not wait for them.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from mongo_celery.bridge.http.page import POLICY, render_page
from mongo_celery.bridge.http.recent import Recent, call_all
from mongo_celery.bridge.http.server import HttpServer, Response
from mongo_celery.bridge.operations.bridge_snapshot import BridgeSnapshot, Workers, to_plain, unreadable
from mongo_celery.bridge.operations.snapshot_reader import read_snapshot
from mongo_celery.bridge.wiring import BRIDGES, Wiring
from mongo_celery.broker.workers import ask_for_queues
from mongo_celery.findings import EXIT_CODES

if TYPE_CHECKING:
    from celery import Celery

    from mongo_celery.bridge.listener.activity import Activity


class _Bridge:
    """One bridge: its listener in this process, and its servers' answers."""

    def __init__(self, wiring: Wiring, activity: Activity) -> None:
        read = partial(read_snapshot, wiring, wiring.line)
        self.activity = activity
        self.reach: Recent[object] = Recent(wiring.reach, str)
        self.snapshot = Recent(read, partial(unreadable, wiring.name))
        self.workers = Recent(partial(_count_workers, wiring), lambda _error: None, keep=15.0)

    def read_whole(self) -> BridgeSnapshot:
        """Return the snapshot and the answering workers. Both are read concurrently."""
        reads: list[Callable[[], Any]] = [self.snapshot, self.workers]
        snapshot, workers = call_all(reads)
        found: BridgeSnapshot = replace(snapshot, workers=workers)
        return found

    def describe_readiness(self) -> dict[str, Any]:
        """Return whether the listener is ready, and why MongoDB does not answer."""
        found = self.reach()
        error = found if isinstance(found, str) else None
        ready = self.activity.is_ready and error is None
        return {"bridge": self.activity.bridge, "ready": ready, "role": self.activity.role, "error": error}


class HttpService(HttpServer):
    """
    The HTTP service beside the listeners of one process.

    Raises:
        ConfigurationError: the address cannot be bound.
    """

    def __init__(self, app: Celery, activities: Sequence[Activity], address: str) -> None:
        wirings = BRIDGES.select(app, [each.bridge for each in activities])
        self._activities = activities
        self._bridges = [_Bridge(*each) for each in zip(wirings, activities, strict=True)]
        self._metrics_of_others = Recent(partial(_read_metrics, app), lambda _error: [])
        self._host, self._pid = socket.gethostname(), os.getpid()
        routes: dict[str, Callable[[], Response]] = {
            "/": self._page,
            "/status": self._status,
            "/verdict": self._verdict,
            "/readyz": self._readiness,
            "/healthz": self._health,
            "/metrics": self._metrics,
        }
        super().__init__(address, lambda path: routes[path]() if path in routes else None)

    def _health(self) -> Response:
        bridges = [{"bridge": each.bridge, "alive": each.is_alive, "role": each.role} for each in self._activities]
        alive = all(each["alive"] for each in bridges)
        return _as_json({"alive": alive, "bridges": bridges}, ok=alive)

    def _readiness(self) -> Response:
        bridges = call_all([each.describe_readiness for each in self._bridges])
        ready = all(each["ready"] for each in bridges)
        return _as_json({"ready": ready, "bridges": bridges}, ok=ready)

    def _read_snapshots(self) -> list[BridgeSnapshot]:
        return call_all([each.snapshot for each in self._bridges])

    def _verdict(self) -> Response:
        snapshots = self._read_snapshots()
        worst = max((each.verdict for each in snapshots), key=EXIT_CODES.__getitem__)
        names = ("bridge", "verdict", "note", "findings")
        shown = [{name: to_plain(getattr(each, name)) for name in names} for each in snapshots]
        return _as_json({"verdict": worst, "bridges": shown}, ok=worst != "failing")

    def _metrics(self) -> Response:
        try:
            from mongo_celery.bridge.http.metrics import expose
        except ImportError:
            text = b"There are no metrics. Run: pip install 'mongo-celery[metrics]'\n"
            return Response(text, status=HTTPStatus.NOT_IMPLEMENTED)
        found = expose(self._activities, self._read_snapshots, self._metrics_of_others)
        return Response(found, "text/plain; version=0.0.4; charset=utf-8")

    def _status(self) -> Response:
        snapshots = call_all([each.read_whole for each in self._bridges])
        return _as_json(
            {"process": {"host": self._host, "pid": self._pid}, "bridges": [each.plain() for each in snapshots]}
        )

    def _page(self) -> Response:
        snapshots = call_all([each.read_whole for each in self._bridges])
        text = render_page(snapshots, self._host, self._pid)
        return Response(text.encode(), "text/html; charset=utf-8", policy=POLICY)


def _as_json(value: dict[str, Any], *, ok: bool = True) -> Response:
    status = HTTPStatus.OK if ok else HTTPStatus.SERVICE_UNAVAILABLE
    return Response(json.dumps(value).encode(), "application/json", status)


def _count_workers(wiring: Wiring) -> Workers | None:
    """Return the workers that answer within a second."""
    found = ask_for_queues(wiring.app, 1.0).values()
    serving = sum(not queues.isdisjoint(wiring.queue_names) for queues in found)
    return Workers(answered=len(found), serving=serving, slots=None)


def _read_metrics(app: Celery) -> list[Any]:
    from mongo_celery.bridge.http.metrics import read_others

    return read_others(app)
