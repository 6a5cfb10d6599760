"""
What is served beside the listeners of one process: probes, metrics, and a page for people.

| path | what it tells |
|---|---|
| `/healthz` | whether the loops of this process turn. It asks nobody, so nothing that hangs elsewhere can keep it |
| `/verdict` | the verdict on each bridge, as `status` gives it: 503 where one is failing; for an alarm |
| `/metrics` | for Prometheus |
| `/`, `/status` | the page, and what it shows as JSON |

All of it is read-only, and in threads of its own; the listener waits for none of them.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from functools import cache
from http import HTTPStatus
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Self

from mongo_celery.bridge.http.server import Answering, HttpListener, Response, said
from mongo_celery.bridge.http.sights import Sights
from mongo_celery.bridge.operations.verdict import EXIT_CODES
from mongo_celery.bridge.wiring import BRIDGES
from mongo_celery.command_line import CommandLine

if TYPE_CHECKING:
    from celery import Celery

    from mongo_celery.bridge.http.address import HttpAddress
    from mongo_celery.bridge.listener.activity import Activity
    from mongo_celery.bridge.wiring import Wiring

logger = logging.getLogger("mongo_celery.http")

_JSON = "application/json"
_HTML = "text/html; charset=utf-8"


class HttpService:
    """
    HTTP beside the listeners of one process, from entering to leaving.

    Args:
        app: of the bridges.
        activities: of the listeners.
        address: where to serve.
        app_argument: what was given to `celery -A`, for the commands that are shown.

    Raises:
        ConfigurationError: when it is entered, and the address cannot be served at.
    """

    def __init__(
        self,
        app: Celery,
        activities: Sequence[Activity],
        address: HttpAddress,
        app_argument: object = None,
    ) -> None:
        def line(wiring: Wiring) -> CommandLine:
            given = app_argument if isinstance(app_argument, str) else "APP"
            return CommandLine(given, wiring.name if len(BRIDGES.of(wiring.app)) > 1 else None)

        self._activities = activities
        self._address = address
        self._sights = Sights(app, BRIDGES.named(app, [each.bridge for each in activities]), line)
        self._exposition = _exposition(app, activities, self._sights)
        self._server: HttpListener | None = None

    def __enter__(self) -> Self:
        self._server = HttpListener(self._address, self.answer)
        self._server.start()
        logger.info("serving HTTP at http://%s/", self._server.address, extra={"event": "http_serving"})
        return self

    def __exit__(self, *error: object) -> None:
        assert self._server is not None, "what is left was entered"
        self._server.stop()
        self._sights.stop()

    def answer(self, path: str, accept: str) -> Response | None:
        """What is at a path; None where nothing is."""
        match path:
            case "/healthz":
                return self._health()
            case "/verdict":
                return self._verdict()
            case "/metrics":
                return self._exposition(path, accept)
            case "/status":
                return _as_json(self._status())
            case "/" | "/index.html":
                return page()
        return None

    def _health(self) -> Response:
        bridges = [_of_process(each) for each in self._activities]
        alive = all(each["alive"] for each in bridges)
        status = HTTPStatus.OK if alive else HTTPStatus.SERVICE_UNAVAILABLE
        return _as_json({"alive": alive, "bridges": bridges}, status)

    def _verdict(self) -> Response:
        verdicts = [sight.verdict for sight in self._sights.bridges().values()]
        worst = max((each.state for each in verdicts), key=lambda state: EXIT_CODES[state], default="healthy")
        told = [{"bridge": each.bridge, **each.plain()} for each in verdicts]
        status = HTTPStatus.SERVICE_UNAVAILABLE if worst == "failing" else HTTPStatus.OK
        return _as_json({"verdict": worst, "bridges": told}, status)

    def _status(self) -> dict[str, Any]:
        shown = self._sights.shown()
        return {
            "process": {"host": socket.gethostname(), "pid": os.getpid()},
            "bridges": [{**shown[each.bridge], **_of_process(each)} for each in self._activities],
            **self._sights.others(),
        }


def _of_process(activity: Activity) -> dict[str, Any]:
    return {"bridge": activity.bridge, "alive": activity.is_alive, "leads": activity.version is not None}


def _as_json(value: Mapping[str, Any], status: HTTPStatus = HTTPStatus.OK) -> Response:
    return Response(json.dumps(value, default=str).encode(), _JSON, status)


@cache
def page() -> Response:
    """The page; what of it is style and script is named by its digest, so that nothing else in it is obeyed."""
    text = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    allowed: dict[str, list[str]] = {"style": [], "script": []}
    inlines = [(kind, part.partition(f"</{kind}>")[0]) for kind in allowed for part in text.split(f"<{kind}>")[1:]]
    for kind, inline in inlines:
        allowed[kind].append(f"'sha256-{base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()}'")
    policy = (
        f"default-src 'none'; style-src {' '.join(allowed['style'])}; script-src {' '.join(allowed['script'])}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return Response(text.encode(), _HTML, policy=policy)


def _exposition(app: Celery, activities: Sequence[Activity], sights: Sights) -> Answering:
    """What is at `/metrics`: without prometheus-client a sentence on how to have it."""
    try:
        from prometheus_client import CollectorRegistry, ProcessCollector
        from prometheus_client.exposition import choose_encoder

        from mongo_celery.bridge.http.metrics import BoundedCollector, BridgeCollector
        from mongo_celery.outbox.prometheus import OutboxCollector
        from mongo_celery.twophase.prometheus import TransactionCollector
    except ImportError as error:
        missing = said(f"There are no metrics: {error}.", HTTPStatus.NOT_IMPLEMENTED)
        return lambda _path, _accept: missing
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(BridgeCollector(activities, sights.bridges))
    others = [BoundedCollector(collector) for collector in (OutboxCollector(app), TransactionCollector(app))]
    for each in others:
        registry.register(each)

    def expose(_path: str, accept: str) -> Response:
        for each in others:
            each.ask()  # now, so that all wait at the same time
        encode, content_type = choose_encoder(accept)
        return Response(encode(registry), content_type)

    return expose
