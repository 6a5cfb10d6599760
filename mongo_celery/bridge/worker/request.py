"""
The Celery request that is made of a message: only the signed envelope is trusted.

Celery honours much of a message before a task is called, in the parent process of the pool: time limits, expiry, ETA,
stamps, links, chords. None of it is needed, since the listener sends none, and whoever can write to the broker could
drive a change into its failure policy by it. So the request is made anew from the parts that carry no power: the ids,
labels for logs, headers that Celery does not know (of tracing), the argument, and the chain. Id and chain are signed in
the envelope, and compared where the key is known: in the process of the pool. What else a message asks for is noted,
and the message is dropped there, before anything happens. Time limits are the handler's (`limits`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from celery.app.task import Context
from celery.worker.request import Request
from kombu.utils.uuid import uuid

from mongo_celery.bridge.worker.limits import RUN_SECONDS
from mongo_celery.bridge.worker.runtime import UNEXPECTED

_HONOURED = frozenset(name for name in vars(Context) if not name.startswith("__")) | {UNEXPECTED, RUN_SECONDS}
_CARRIED = frozenset({"id", "task", "root_id", "parent_id", "argsrepr", "kwargsrepr", "origin"})
_HARMLESS = frozenset({"ignore_result", "hostname", "delivery_info", "properties", "correlation_id"})
"""Set by the request itself, whatever the message says."""

_JUDGED = _HONOURED - _CARRIED - _HARMLESS
_ABSENT = dict.fromkeys(_CARRIED)
_NO_LIMITS = ([None, None], (None, None))
_EMBEDDED = ("callbacks", "errbacks", "chord")
_PAYLOAD_PARTS = 3


def _sanitize_headers(headers: Mapping[str, Any], unexpected: list[str]) -> dict[str, Any]:
    """Return the headers as a listener could have made them. The names of what is left out are added to a list."""
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
    """Return the payload as a listener could have made it. The names of what is left out are added to a list."""
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
    """Return a request class that trusts nothing outside the envelope. The rest is the given class's."""

    class HardenedRequest(base):  # type: ignore[misc, valid-type]
        """See the module."""

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
            if hasattr(task, "limits_of_runs"):  # not a commit
                limits = task.limits_of_runs()
                request |= {"timelimit": limits.time_limits, RUN_SECONDS: limits.seconds}
            super().__init__(message, headers=request, body=payload, decoded=True, task=task, **options)
            self._request_dict["reply_to"] = None

    return HardenedRequest
