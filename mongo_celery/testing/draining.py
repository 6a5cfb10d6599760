"""Waiting for real listeners and workers, wherever they run, until they have done what was written."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from bson import Timestamp

from mongo_celery.arguments import Duration, positive
from mongo_celery.bridge.wiring import Wiring
from mongo_celery.mongo.oplog import operation_time

_PAUSE_SECONDS = 0.05


class Running(Protocol):
    """A `Bridge`, as far as it is needed here."""

    @property
    def wiring(self) -> Wiring:
        """What its parts are handed."""


def drain(bridge: Running, timeout: Duration = 30.0) -> None:
    """
    Wait until the listener and the workers of a bridge have handled all that was written before the call.

    For processes: they run the bridge with the same URL, name and `database`. Not waited for: tasks that handlers have
    sent, and what handlers write.

    Args:
        bridge: of which the process of the test has the configuration and the handlers.
        timeout: seconds or `timedelta`.

    Raises:
        TimeoutError: it took longer; with the handlers that are behind, and what is said of their partitions.
    """
    wait_until_handled(bridge, timeout, lambda: None)


def wait_until_handled(bridge: Running, timeout: Duration, check: Callable[[], None]) -> None:
    """As `drain`; between two looks `check` is called, which may raise."""
    wiring, until = bridge.wiring, time.monotonic() + positive(timeout, "timeout")
    aim = operation_time(wiring.client)
    while behind := _behind(wiring, aim):
        check()
        if time.monotonic() > until:
            raise TimeoutError(
                f"bridge {wiring.name} has not handled everything within {positive(timeout, 'timeout'):g} s: "
                f"{', '.join(behind)} behind{_standing(wiring)}; do a listener and a worker run on this MongoDB? "
                "`celery -A APP changes status` tells more.",
            )
        time.sleep(_PAUSE_SECONDS)


def _behind(wiring: Wiring, aim: Timestamp) -> list[str]:
    """Handlers whose watermark has not passed a time."""
    found: dict[str, Any] = {
        document["_id"]: document.get("clusterTime") for document in wiring.store.subscriptions.read_all()
    }
    places = ((handler.name, found.get(f"{wiring.name}/{handler.name}")) for handler in wiring.handlers)
    return [name for name, place in places if place is None or place < aim]


def _standing(wiring: Wiring) -> str:
    """What stands, for the error."""
    partitions = wiring.client[wiring.options.database]["partitions"]
    found: Iterable[dict[str, Any]] = partitions.find(
        {"_id": {"$regex": f"^{wiring.name}/"}, "state": {"$ne": "flowing"}}, limit=3
    )
    said = [f"{each['_id']} is {each['state']}" for each in found]
    return f" ({', '.join(said)})" if said else ""
