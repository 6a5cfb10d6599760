"""Facts that handlers record, in a database that no fault touches, and the gates that they wait at."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

from pymongo import MongoClient
from pymongo.database import Database

_POLL_SECONDS = 0.02

_clients: dict[int, MongoClient[dict[str, Any]]] = {}
_making = threading.Lock()


def facts() -> Database[dict[str, Any]]:
    with _making:
        if os.getpid() not in _clients:
            _clients[os.getpid()] = MongoClient(os.environ["SCRIPTED_FACTS"], w=1, appname="facts")
    return _clients[os.getpid()][f"{os.environ['PROJECT_NAMES']}_facts"]


def record(kind: str, **fact: Any) -> None:
    """Note a fact with its process and the monotonic time, which all processes share."""
    facts()[kind].insert_one({**fact, "pid": os.getpid(), "at": time.monotonic_ns()})


def record_start(fact: dict[str, Any], **more: Any) -> int:
    """
    Note a start of a handler, and return which one it is for its change; the first is 1.

    The earlier ones are counted before this one is noted: a test that sees it may freeze this process at once.
    """
    which = 1 + facts()["start"].count_documents({name: fact[name] for name in ("handler", "key", "n")})
    record("start", **fact, **more)
    return which


def wait_at(gate: str, seconds: float = 120.0) -> None:
    path = Path(os.environ["SCRIPTED_GATES"]) / gate
    pause = threading.Event()
    until = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < until:
        pause.wait(_POLL_SECONDS)


def take_time(seconds: float) -> None:
    """Be slow, in small steps, so that a soft time limit finds its way in."""
    pause = threading.Event()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pause.wait(_POLL_SECONDS)
