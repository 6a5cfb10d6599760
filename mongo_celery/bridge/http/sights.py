"""What the state of a bridge, of the outboxes and of the transactions of an app looks like at one moment."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pymongo
from pymongo.errors import PyMongoError

from mongo_celery.bridge.operations.letter_commands import read_newest
from mongo_celery.bridge.operations.overview import LETTERS_MAX, overview
from mongo_celery.bridge.operations.readings import WAIT_SECONDS, Reading
from mongo_celery.bridge.operations.status import read_status
from mongo_celery.bridge.operations.verdict import BridgeVerdict, judge, unreadable
from mongo_celery.command_line import CommandLine
from mongo_celery.mongo.redaction import short
from mongo_celery.outbox.registry import OUTBOXES
from mongo_celery.twophase.twophase import TWO_PHASE_COMMITS

if TYPE_CHECKING:
    from celery import Celery

    from mongo_celery.bridge.wiring import Wiring

_ANSWER_SECONDS = 2.5
_KEEP_OTHERS = 5.0


@dataclass(frozen=True, slots=True)
class Sight:
    """
    A bridge at one moment.

    Attributes:
        status: as `read_status` gives it; None where it cannot be read.
    """

    verdict: BridgeVerdict
    status: Mapping[str, Any] | None = None

    def plain(self, letters: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the verdict as JSON, with the overview under `status`; null where it cannot be read."""
        shown = overview(self.status, letters) if self.status is not None else None
        return {"bridge": self.verdict.bridge, **self.verdict.plain(), "status": shown}


def read_sight(wiring: Wiring, line: CommandLine) -> Sight:
    """
    Read the state of a bridge, and judge it as `status` does: broker and workers are not asked.

    Raises:
        MongoCeleryError: as for `read_status`.
    """
    status = read_status(wiring)
    return Sight(judge(status, line=line), status)


class Sights:
    """
    What MongoDB says of all that is served here; nobody waits for it longer than `WAIT_SECONDS`.

    Args:
        app: whose outboxes and transactions are shown, too.
        bridges: that are listened for.
        line: how commands are typed, by bridge.
    """

    def __init__(self, app: Celery, bridges: Sequence[Wiring], line: Callable[[Wiring], CommandLine]) -> None:
        def reading(wiring: Wiring) -> Reading[Sight]:
            return Reading("MongoDB", lambda: read_sight(wiring, line(wiring)))

        self._app = app

        def letters(wiring: Wiring) -> Reading[list[dict[str, Any]]]:
            return Reading("MongoDB", lambda: read_newest(wiring, LETTERS_MAX), keep=_KEEP_OTHERS)

        self._bridges = {wiring.name: reading(wiring) for wiring in bridges}
        self._letters = {wiring.name: letters(wiring) for wiring in bridges}
        self._others = Reading("MongoDB", self._read_others, keep=_KEEP_OTHERS)

    def bridges(self) -> dict[str, Sight]:
        """Each bridge; unreadable where there is no answer in time."""
        for reading in self._bridges.values():
            reading.ask()
        until = time.monotonic() + WAIT_SECONDS
        found = {}
        for name, reading in self._bridges.items():
            answer = reading.get(until)
            found[name] = answer.value or Sight(unreadable(name, answer.error or "It cannot be read."))
        return found

    def shown(self) -> dict[str, dict[str, Any]]:
        """Return each bridge as the page shows it, as JSON; without dead letters where they cannot be read in time."""
        sights = self.bridges()
        some = [name for name, sight in sights.items() if sight.status and sight.status["dead_letters"]]
        asked = {name: self._letters[name] for name in some}
        for reading in asked.values():
            reading.ask()
        until = time.monotonic() + WAIT_SECONDS
        letters = {name: reading.get(until).value or () for name, reading in asked.items()}
        return {name: sight.plain(letters.get(name, ())) for name, sight in sights.items()}

    def others(self) -> Mapping[str, Any]:
        """`outboxes` and `transactions` of the app, as JSON."""
        empty: dict[str, Any] = {"outboxes": [], "transactions": []}
        if not OUTBOXES.of(self._app) and not TWO_PHASE_COMMITS.of(self._app):
            return empty
        answer = self._others.get(time.monotonic() + WAIT_SECONDS)
        return answer.value or {**empty, "error": answer.error}

    def stop(self) -> None:
        """Read no more."""
        self._others.stop()
        for reading in self._bridges.values():
            reading.stop()
        for listing in self._letters.values():
            listing.stop()

    def _read_others(self) -> Mapping[str, Any]:
        with pymongo.timeout(_ANSWER_SECONDS):
            outboxes = [_outbox(each) for each in OUTBOXES.of(self._app)]
            transactions = [_transactions(each) for each in TWO_PHASE_COMMITS.of(self._app)]
        return {"outboxes": outboxes, "transactions": transactions}


def _outbox(outbox: Any) -> dict[str, Any]:
    try:
        status = outbox.status()
    except (PyMongoError, ValueError) as error:
        return {"name": _name(outbox), "error": short(error)}
    return {
        "name": outbox.name,
        "error": None,
        "pending": status.pending,
        "documents": status.documents,
        "failing": status.failing,
        "oldest_seconds": status.oldest_seconds,
        "dead_letters": status.dead_letters,
    }


def _name(outbox: Any) -> str:
    try:
        return str(outbox.name)
    except (PyMongoError, ValueError):  # a collection that cannot be opened
        return "outbox"


def _transactions(chosen: Any) -> dict[str, Any]:
    try:
        standing = chosen.log.standing()
    except (PyMongoError, ValueError) as error:
        return {"name": chosen.name, "error": short(error)}
    return {
        "name": chosen.name,
        "error": None,
        "unfinished": {str(state): each.count for state, each in sorted(standing.items())},
        "oldest_seconds": max((each.oldest_seconds for each in standing.values()), default=None),
    }
