"""
The leader's mark at the broker: tells two apps that share a broker and a bridge name, but no state.

The lease refuses a second app on the same MongoDB. Two apps with state databases of their own know nothing of each
other, yet take each other's messages where they share a broker. So whoever leads keeps a mark there, renewed every
`BEAT_SECONDS`, and a listener that starts looks at it first. What counts as life is that a mark changes, never a clock:
one that does not change was left behind, by a process that was killed or whose state database was made anew.

The broker is disposable, and so is the mark: an emptied or silent broker stops nobody, and nobody who leads steps down
for a mark, whatever it says. Two that began at the same moment therefore both lead; each says so.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Self

from mongo_celery.app import app_name
from mongo_celery.bridge.worker.dropping import named_by_itself
from mongo_celery.broker.notice import NoticeBoard
from mongo_celery.errors import ForeignBridgeError
from mongo_celery.mongo.redaction import short

if TYPE_CHECKING:
    from mongo_celery.bridge.wiring import Wiring

logger = logging.getLogger("mongo_celery.listener")

BEAT_SECONDS = 3.0
_WATCHED_BEATS = 3
_LOOK_SECONDS = 0.5
_BROKER_SECONDS = 5
_COMPLAINT_SECONDS = 30.0
_TERMS_MAX = 100
_STOP_SECONDS = 0.3


@dataclass(frozen=True, slots=True)
class LeaderMark:
    """
    Who leads, as it says itself: nobody signs this, since the one who reads it has another key.

    Attributes:
        term: made anew for each term.
        beat: grows with each renewal of the mark.
    """

    installation: str
    app: str
    host: str
    pid: str
    term: str
    beat: int

    @classmethod
    def read(cls, notice: Mapping[str, Any]) -> Self | None:
        """From what stood at the broker; None where that is something else."""
        texts = {name: named_by_itself(notice.get(name)) for name in ("installation", "app", "host", "pid", "term")}
        beat = notice.get("beat")
        if not texts["installation"] or not texts["term"] or type(beat) is not int:
            return None
        return cls(beat=beat, **{name: text or "unknown" for name, text in texts.items()})

    @property
    def who(self) -> str:
        """For people."""
        return f"app {self.app}, process {self.pid} on {self.host}"


class SignsOfLife:
    """Which marks have changed while one looked."""

    def __init__(self) -> None:
        self._beats: dict[str, int] = {}

    def show(self, mark: LeaderMark) -> bool:
        """Look at a mark; whether it is newer than one of the same term that was seen before."""
        known = self._beats.get(mark.term)
        if known is None and len(self._beats) >= _TERMS_MAX:
            self._beats.clear()
        self._beats[mark.term] = mark.beat if known is None else max(known, mark.beat)
        return known is not None and mark.beat > known


def board_of(wiring: Wiring) -> NoticeBoard:
    """Where a bridge's mark stands; the name is none that the queue of a partition could have."""
    return NoticeBoard(wiring.app, f"{wiring.name}.leader", _BROKER_SECONDS)


def refuse_foreign_leader(wiring: Wiring, stopping: threading.Event) -> None:
    """
    Look at the broker before a start, for some seconds if there is a mark of another installation.

    Not promised: anything where the broker does not answer, or holds no mark at this moment.

    Raises:
        ForeignBridgeError: another installation leads a bridge of this name on this broker.
    """
    board = board_of(wiring)
    try:
        if board.is_possible:
            foreign = _living_foreigner(board, wiring, stopping)
            where = board.where
        else:
            foreign = None
    except Exception as failure:  # noqa: BLE001 - of the broker's client; its contents and its absence stop nobody
        logger.debug("the leader's mark cannot be looked at: %s", short(failure))
        return
    finally:
        board.close()
    if foreign is not None:
        raise ForeignBridgeError(
            f"the bridge name {wiring.name!r} is taken on the broker {where}: {foreign.who} leads a bridge of this "
            "name there, with a state database of its own, and each would take the other's messages. Give this app's "
            "Bridge another name='...', or one of the two another broker, virtual host, database or "
            "global_keyprefix. If it is this app with another state database, end that listener.",
        )


def _living_foreigner(board: NoticeBoard, wiring: Wiring, stopping: threading.Event) -> LeaderMark | None:
    """A foreign mark that changes; None as soon as there is no mark, or one of this installation."""
    signs = SignsOfLife()
    until = time.monotonic() + _WATCHED_BEATS * BEAT_SECONDS
    is_watching = False
    while not stopping.is_set():
        marks = _look(board)
        own = _installation(wiring)  # each time: whoever leads first with a new state database makes the id
        if any(mark.installation == own for mark in marks) or not (marks or is_watching):
            return None
        for mark in marks:
            if signs.show(mark):
                return mark
        if time.monotonic() >= until:
            return None
        if not is_watching:
            is_watching = True
            logger.info(
                "%s has left a mark at the broker as the leader of a bridge named %s; looking whether it lives",
                marks[-1].who,
                wiring.name,
                extra={"event": "foreign_mark"},
            )
        stopping.wait(_LOOK_SECONDS)
    return None


def _look(board: NoticeBoard) -> list[LeaderMark]:
    marks = _read(board.take())
    for mark in marks:
        board.put(asdict(mark))
    return marks


def _read(notices: list[dict[str, Any]]) -> list[LeaderMark]:
    return [mark for mark in map(LeaderMark.read, notices) if mark is not None]


def _installation(wiring: Wiring) -> str | None:
    lease = wiring.store.leases.read()
    return None if lease is None else lease.get("installation")


class MarkKeeper:
    """
    Keeps the mark of one term, from a thread of its own: nothing waits for it, and what fails is tried again.

    Args:
        wiring: of the bridge that is led.
        installation: of its state.
    """

    def __init__(self, wiring: Wiring, installation: str) -> None:
        self._bridge = wiring.name
        self._board = board_of(wiring)
        self._drops = wiring.store.drops
        self._term = secrets.token_hex(8)
        self._about = {
            "installation": installation,
            "app": app_name(wiring.app) or "without a name",
            "host": socket.gethostname(),
            "pid": str(os.getpid()),
            "term": self._term,
        }
        self._signs = SignsOfLife()
        self._complained_at = -_COMPLAINT_SECONDS
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mongo_celery-mark", daemon=True)

    def start(self) -> None:
        """Put up the mark, and go on renewing it."""
        self._thread.start()

    def stop(self) -> None:
        """Take it down, and wait for that, unless the broker takes its time."""
        self._stopping.set()
        self._thread.join(_STOP_SECONDS)

    def _run(self) -> None:
        if not self._tried(lambda: self._board.is_possible):
            return
        beat = 0
        while not self._stopping.is_set():
            beat += 1
            mark = {**self._about, "beat": beat}
            self._tried(lambda mark=mark: self._renew(mark))  # type: ignore[misc]
            self._stopping.wait(BEAT_SECONDS)
        self._tried(self._board.take)
        self._board.close()

    def _renew(self, mark: Mapping[str, Any]) -> None:
        before = _read(self._board.take())
        self._board.put(mark)
        for each in before:
            if each.installation != mark["installation"] and self._signs.show(each):
                self._notice(each)

    def _tried(self, act: Callable[[], object]) -> object:
        try:
            return act()
        except Exception as failure:  # noqa: BLE001 - of the broker's client; the mark is disposable
            self._board.close()
            logger.debug("the leader's mark cannot be kept: %s", short(failure))
            return None

    def _notice(self, mark: LeaderMark) -> None:
        if time.monotonic() - self._complained_at < _COMPLAINT_SECONDS:
            return
        self._complained_at = time.monotonic()
        logger.error(
            "another listener leads a bridge named %s on this broker, with a state database of its own: %s. Each takes "
            "the other's messages, and a restart of either is refused while only the other leads. Give each bridge a "
            "name of its own with name='...', or each app a broker, virtual host, database or global_keyprefix of its "
            "own",
            self._bridge,
            mark.who,
            extra={"event": "foreign_leader"},
        )
        self._drops.name_foreign_leader(mark.who)
