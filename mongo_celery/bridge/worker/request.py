"""
The Celery request for a message. It trusts only the signed envelope.

Celery interprets much of a message before it calls a task, in the pool's parent process: time limits, expiry, ETA,
stamps, links, chords. The listener sends none of them. A writer to the broker could use them to drive a change into its
failure policy. So the request is rebuilt from harmless parts: ids, labels for logs, headers unknown to Celery (of
tracing), the argument, and the chain. The envelope signs id and chain. The pool's process, which knows the key,
compares them. If a message requests anything else, that is noted, and the pool's process drops the message before
anything happens. Time limits are the handler's (`limits`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from celery.app.task import Context
from celery.worker.request import Request
from kombu.utils.uuid import uuid

from mongo_celery.bridge.worker.limits import RUN_SECONDS, run_limits
from mongo_celery.bridge.worker.runtime import UNEXPECTED

_HONOURED = frozenset(name for name in vars(Context) if not name.startswith("__")) | {UNEXPECTED, RUN_SECONDS}
_CARRIED = frozenset({"id", "task", "root_id", "parent_id", "argsrepr", "kwargsrepr", "origin"})
_HARMLESS = frozenset({"ignore_result", "hostname", "delivery_info", "properties", "correlation_id"})
"""The request sets them itself and ignores the message."""

_JUDGED = _HONOURED - _CARRIED - _HARMLESS
_ABSENT = dict.fromkeys(_CARRIED)
_NO_LIMITS = ([None, None], (None, None))
_EMBEDDED = ("callbacks", "errbacks", "chord")
_PAYLOAD_PARTS = 3


def _sanitize_headers(headers: Mapping[str, Any], unexpected: list[str]) -> dict[str, Any]:
    """Return the headers that a listener may send. Add the names of omitted ones to a list."""
    kept: dict[str, Any] = {}
    for name, value in headers.items():
        if name in _CARRIED:
            kept[name] = value if isinstance(value, str) else None
        elif name not in _HONOURED:
            if isinstance(name, str):
                kept[name] = value
        elif value and name in _JUDGED and value not in _NO_LIMITS:
            unexpected.append(str(name))
    return {
        **_ABSENT,
        **kept,
        "id": kept.get("id") or uuid(),
        "task": headers["task"],
        "argsrepr": kept.get("argsrepr") or "",
        "kwargsrepr": kept.get("kwargsrepr") or "",
        "ignore_result": True,
        "retries": 0,
        "timelimit": (None, None),
        "stamps": {},
        "stamped_headers": None,
    }


def _sanitize_payload(payload: Any, unexpected: list[str]) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
    """Return the payload that a listener may send. Add the names of omitted ones to a list."""
    if not isinstance(payload, (list, tuple)) or len(payload) != _PAYLOAD_PARTS:
        unexpected.append("body")
        return [], {}, {}
    args, kwargs, embedded = payload
    embedded = embedded if isinstance(embedded, Mapping) else {"chain": "?"}
    unexpected.extend(filter(embedded.get, _EMBEDDED))
    chain = embedded.get("chain") or None
    if not isinstance(chain, (list, type(None))):
        unexpected.append("chain")
        chain = None
    if not isinstance(args, (list, tuple)) or len(args) != 1 or kwargs:
        unexpected.append("args")
        args = []
    return list(args), {}, {**dict.fromkeys(_EMBEDDED), "chain": chain}


@cache
def harden_request(base: type[Request]) -> type[Request]:
    """Return a request class that trusts only the envelope. Otherwise it behaves like the given class."""

    class HardenedRequest(base):  # type: ignore[misc, valid-type]
        """A request that trusts only the envelope, as the module explains."""

        def __init__(
            self,
            message: Any,
            *,
            headers: Any = None,
            body: Any = None,
            decoded: bool = False,
            task: Any = None,
            **options: Any,
        ) -> None:
            given = message.headers if headers is None else headers
            unexpected: list[str] = []
            payload = _sanitize_payload(body if decoded else message.payload, unexpected)
            request = _sanitize_headers(given, unexpected)
            if (message.properties or {}).get("reply_to"):
                unexpected.append("reply_to")
            request[UNEXPECTED] = unexpected
            if hasattr(task, "handler"):  # not a commit
                limits = run_limits(task)
                request |= {"timelimit": limits.time_limits, RUN_SECONDS: limits.seconds}
            super().__init__(message, headers=request, body=payload, decoded=True, task=task, **options)
            self._request_dict["reply_to"] = None

    return HardenedRequest
