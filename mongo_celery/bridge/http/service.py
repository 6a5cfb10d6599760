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
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from mongo_celery.bridge.http.page import POLICY, render_page
from mongo_celery.bridge.http.recent import Recent, call_all
from mongo_celery.bridge.http.server import HttpServer, Response
from mongo_celery.bridge.operations.bridge_snapshot import EXIT_CODES, BridgeSnapshot, Workers, unreadable
from mongo_celery.bridge.operations.snapshot_reader import read_snapshot
from mongo_celery.bridge.wiring import BRIDGES, Wiring
from mongo_celery.broker.workers import ask_for_queues
from mongo_celery.command_line import CommandLine
from mongo_celery.outbox.registry import OUTBOXES
from mongo_celery.quantities import duration
from mongo_celery.twophase.twophase import TWO_PHASE_COMMITS

if TYPE_CHECKING:
    from celery import Celery

    from mongo_celery.bridge.listener.activity import Activity


class _Bridge:
    """One bridge: its listener in this process, and what servers answer about it."""

    def __init__(self, wiring: Wiring, activity: Activity, program: str) -> None:
        read = partial(read_snapshot, wiring, CommandLine(program, wiring.line.bridge))
        explain = partial(unreadable, wiring.name)
        self.activity = activity
        self.reach: Recent[object] = Recent(wiring.reach, str)
        self.snapshot = Recent(partial(read, groups=False), explain)
        self.snapshot_with_groups = Recent(read, explain)
        self.workers = Recent(partial(_count_workers, wiring), lambda _error: None, keep=15.0)

    def read_whole(self) -> BridgeSnapshot:
        """Return the snapshot with its dead letters, and the workers that answer."""
        return replace(self.snapshot_with_groups(), workers=self.workers())

    def describe_readiness(self) -> dict[str, Any]:
        """Return whether its listener is ready, and why MongoDB does not answer."""
        found = self.reach()
        error = found if isinstance(found, str) else None
        ready = self.activity.is_ready and error is None
        return {"bridge": self.activity.bridge, "ready": ready, "role": self.activity.role, "error": error}


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
        self._bridges = [_Bridge(*each, program) for each in zip(wirings, activities, strict=True)]
        self._others = Recent(partial(_describe_others, app), lambda error: [("error", error)], keep=5.0)
        self._metrics_of_others = Recent(partial(_read_metrics, app), lambda _error: [])
        self._process = {"host": socket.gethostname(), "pid": os.getpid()}
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
        bridges = [each.plain() for each in self._read_snapshots()]
        worst = max((each["verdict"] for each in bridges), key=EXIT_CODES.__getitem__)
        names = ("bridge", "verdict", "note", "findings")
        shown = [{name: each[name] for name in names} for each in bridges]
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
        return _as_json({"process": self._process, "bridges": [each.plain() for each in snapshots]})

    def _page(self) -> Response:
        snapshots = call_all([each.read_whole for each in self._bridges])
        text = render_page(snapshots, others=self._others(), **self._process)
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


def _describe_others(app: Celery) -> list[tuple[str, str]]:
    """Return name and state of each outbox and of each `TwoPhaseCommit`."""
    found = []
    for outbox in OUTBOXES.of(app):
        status = outbox.status()
        late = "" if status.oldest_seconds is None else f", the oldest for {duration(status.oldest_seconds)}"
        counts = f"{status.pending} pending{late}, {status.failing} failing, {status.dead_letters} dead letters"
        found.append((outbox.name, counts))
    for commit in TWO_PHASE_COMMITS.of(app):
        states = [f"{each.count} {state}" for state, each in sorted(commit.log.standing().items())]
        found.append((commit.name, ", ".join(states) or "all are final"))
    return found
