"""
A new layout of a subscription: other partitions, or another key, with order per key kept.

Each subscription for itself, in steps that can be repeated; all others flow meanwhile:

1. nothing more is dispatched for it. Each of its partitions is *closed* as soon as nothing runs there: what was handled
   is committed, live claims are waited for, and a lapsed one is ended and charged.
2. the stream is read up to the place that no partition has passed, and at which none stands. Everything in front of it
   that is not committed is stored, marked, and the watermark is there.
3. what is stored is copied to the partitions of the new layout, with what stands (`copying`).
4. these partitions are made, and one guarded write on the subscription puts them in force.
5. what is left of older layouts is removed (`leftovers`), once the new one is seen in force.

A crash anywhere leaves the old layout in force: the next take-over opens its partitions again, and begins anew under a
generation of its own. What a listener does that wakes too late lies under its own generation, and its write of step 4
is refused by the epoch.

A subscription that has lost its history waits under its old layout for somebody's decision: it cannot be read. So does
one whose key changes while keys of it are parked: what waits for these waits by the key that was.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import Enum
from typing import TYPE_CHECKING, Any

from pymongo.errors import PyMongoError

from mongo_celery.bridge.listener.copying import Copying, is_counted
from mongo_celery.bridge.listener.subscription import Subscription, make_trackers
from mongo_celery.bridge.listener.takeover import Takeover, generations_of
from mongo_celery.bridge.listener.tracker import Step, Tracker
from mongo_celery.bridge.options import BridgeOptions
from mongo_celery.bridge.state.claims import process_of
from mongo_celery.bridge.state.partitions import MOVING, Image
from mongo_celery.bridge.state.subscriptions import Layout
from mongo_celery.bridge.window import Mark
from mongo_celery.command_line import ANY_APP, CommandLine
from mongo_celery.errors import LeaseLostError
from mongo_celery.mongo.oplog import time_of_token
from mongo_celery.mongo.verdicts import Concern, brief, raise_if_final

if TYPE_CHECKING:
    from mongo_celery.bridge.listener.spilling import Spilling
    from mongo_celery.bridge.listener.watermarks import Watermarks
    from mongo_celery.bridge.state.store import Store

logger = logging.getLogger("mongo_celery.listener")

_TURN_SECONDS = 0.1
_CLOSE_PAUSE = 0.25
_PAUSE_SECONDS = 1.0
_READ_AGAIN_PAUSE = 1.0
_COMPLAINT_SECONDS = 30.0
_RELIEF = 8  # of the buffer, what one may take in memory while it moves

_REASON = "a new layout"


class _Phase(Enum):
    WAITING = "waits for a decision on its lost history"
    CLOSING = "closes its partitions"
    READING = "reads what its partitions have passed"
    COPYING = "copies what is stored"


@dataclass(slots=True)
class _Move:
    """
    One subscription on its way to another layout.

    Attributes:
        beyond: a place behind which it has to read, since its watermark could not be stored there.
        waits: for what, as a sentence; empty while nothing is waited for.
    """

    subscription: Subscription
    layout: Layout
    phase: _Phase = _Phase.WAITING
    beyond: str = ""
    waits: str = ""
    copying: Copying | None = None
    since: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def open(self) -> list[Tracker]:
        """The partitions that are not closed yet."""
        return [tracker for tracker in self.subscription.trackers.values() if tracker.image.state != MOVING]


class Relayouts:
    """
    The new layouts of one term. Used by the leading thread.

    Args:
        store: the state database.
        options: of the bridge.
        concern: whom an error of the state database concerns.
        watermarks: of this term.
        spilling: stores changes; in its session they are read, and the images that they rest on.
    """

    def __init__(
        self,
        store: Store,
        options: BridgeOptions,
        concern: Concern,
        watermarks: Watermarks,
        spilling: Spilling,
        line: CommandLine = ANY_APP,
    ) -> None:
        self._line = line
        self._store = store
        self._options = options
        self._concern = concern
        self._watermarks = watermarks
        self._spilling = spilling
        self._session = spilling.session
        self._version = 0
        self._led: Mapping[str, Subscription] = {}
        self._moves: dict[str, _Move] = {}
        self._behind: list[Subscription] = []
        self._claims: dict[str, tuple[str, float]] = {}
        self._kept = set[tuple[str, str]]()
        self._ready_at = self._closed_at = self._read_again_at = self._complained_at = 0.0

    def begin(self, subscriptions: Mapping[str, Subscription], takeover: Takeover) -> None:
        """Take in what this term leads, before anything is dispatched."""
        self._led, self._version = subscriptions, takeover.version
        self._moves = {
            name: _Move(subscriptions[name], takeover.wanted[name]) for name in takeover.moving if name in subscriptions
        }
        for move in self._moves.values():
            self._decide(move)

    def due(self) -> float:
        """Monotonic time of the next turn that may have something to do; infinite without one."""
        if not self._moves and not self._behind:
            return float("inf")
        if any(move.phase is _Phase.COPYING for move in self._moves.values()):
            return self._ready_at
        return max(self._ready_at, self._closed_at + _CLOSE_PAUSE)

    def turn(self, now: float, *, at_end: bool) -> list[Subscription]:
        """
        Do what can be done now, within a bound of time.

        Args:
            at_end: whether the stream has no more to give at this moment.

        Returns:
            Subscriptions whose new layout is in force, to take the place of the old ones.

        Raises:
            LeaseLostError: the term has ended.
            MongoCeleryError: something that waiting cannot cure.
        """
        if not self._moves or now < self._ready_at:
            return []
        try:
            for move in self._moves.values():
                self._decide(move)
            self._close(now)
            self._read(self._in(_Phase.READING), at_end=at_end)
            done = self._copy(time.monotonic() + _TURN_SECONDS)
            moved = self._put_in_force(done) if done else []
        except PyMongoError as error:
            self.failed(error)
            return []
        self._complain(now)
        return moved

    def wants_reading(self, now: float) -> bool:
        """Whether the stream should be read again from where the subscriptions stand: one has left something."""
        return bool(self._behind) and now - self._read_again_at >= _READ_AGAIN_PAUSE

    def reads_again(self, now: float) -> None:
        """The stream is read again: those that have left something take in what comes from now on."""
        self._read_again_at = now
        for subscription in self._behind:
            subscription.until = subscription.left = None
        self._behind.clear()

    def report(self) -> list[dict[str, Any]]:
        """What `status` shows of subscriptions on their way to another layout."""
        return [
            {
                "subscription": name,
                "partitions": move.layout.partitions,
                "since": move.since,
                "waits": move.waits or move.phase.value,
            }
            for name, move in list(self._moves.items())
        ]

    def _in(self, phase: _Phase) -> list[_Move]:
        return [move for move in self._moves.values() if move.phase is phase]

    # -- lost history ------------------------------------------------------------------------------

    def _decide(self, move: _Move) -> None:
        """Begin, or, where the history was lost before all was read, let it be until somebody has decided."""
        subscription, waits = move.subscription, _waits(move, self._line)
        if move.phase is _Phase.WAITING and not waits:
            move.phase, move.waits = _Phase.CLOSING, ""
            subscription.is_moving, subscription.until = True, _needed(subscription) or _place(subscription)
        elif move.phase is not _Phase.COPYING and waits:
            assert move.copying is None, "copying never goes back"
            move.phase, move.waits = _Phase.WAITING, "" if subscription.lost else waits
            subscription.is_moving, subscription.until = False, None
            if subscription.left is not None and not subscription.lost:
                self._read_behind(subscription)
            # Nothing was copied yet, else it could not be opened under this version. A late write may close it again.
            closed = [tracker for tracker in subscription.trackers.values() if tracker.image.state == MOVING]
            if closed:
                ids = [tracker.partition_id for tracker in closed]
                self._store.partitions.open(ids, self._version)
                self._observe(subscription, self._store.partitions.look(ids, self._session))

    # -- closing -----------------------------------------------------------------------------------

    def _close(self, now: float) -> None:
        moves = self._in(_Phase.CLOSING)
        if not moves or now - self._closed_at < _CLOSE_PAUSE:
            return
        self._closed_at = now
        free = [tracker.partition_id for move in moves for tracker in move.open if _is_free(tracker)]
        if free:
            images = self._store.partitions.close(free, self._version, self._session)
            if len(images) < len(free):  # a later term has removed them
                raise LeaseLostError
            for move in moves:
                name = move.subscription.name
                self._observe(move.subscription, [image for image in images if image.subscription == name])
        for move in moves:
            move.subscription.until = _needed(move.subscription) or _place(move.subscription)
            still_open = move.open
            move.waits = self._waiting_for(still_open[0], now) if still_open else ""
            if not still_open:
                move.phase = _Phase.READING

    def _observe(self, subscription: Subscription, images: Iterable[Image]) -> None:
        now = time.monotonic()
        for image in images:
            if subscription.observe(image, now) is Step.SUPERSEDED:
                raise LeaseLostError

    def _waiting_for(self, tracker: Tracker, now: float) -> str:
        image = tracker.image
        if not tracker.won:
            return f"waits for partition {image.index}, which an open transaction has locked"
        if image.handled is not None:
            return f"waits for the commit of partition {image.index}"
        if image.claim is None or not image.live:
            return f"closes partition {image.index}"
        owner = str(image.claim["owner"])
        known, since = self._claims.get(tracker.partition_id, ("", now))
        if known != owner:
            since = now
            self._claims[tracker.partition_id] = owner, now
        return f"waits for the claim of partition {image.index} ({process_of(owner)}), live for {now - since:.0f} s"

    # -- reading -----------------------------------------------------------------------------------

    def _read(self, moves: Sequence[_Move], *, at_end: bool) -> None:
        """Once all is closed nobody commits any more, so that the place up to which it is read is known."""
        read = [move for move in moves if self._is_read(move, at_end=at_end)]
        for move in read:
            subscription = move.subscription
            subscription.until = _place(subscription)
            self._keep_all(subscription)
        if read:
            self._watermarks.store(list(self._led.values()), time.monotonic())
            until = time.monotonic() + _TURN_SECONDS
            behind = [move for move in read if self._is_behind_watermark(move)]
            self._begin_copying([move for move in behind if self._are_heads_kept(move.subscription, until)])

    def _is_read(self, move: _Move, *, at_end: bool) -> bool:
        subscription = move.subscription
        needed, seen = _needed(subscription), subscription.window.seen
        is_reached = seen > move.beyond if move.beyond else needed is None or seen >= needed.data
        seeks = _seeks_head(subscription)
        if subscription.left is not None and (seeks or not is_reached):
            self._read_behind(subscription)
        elif is_reached and (at_end or not seeks):
            return True
        else:
            subscription.until = None if seeks or move.beyond else needed
        if subscription.window.size > self._options.buffer_bytes // _RELIEF:
            self._keep_all(subscription)
        return False

    def _is_behind_watermark(self, move: _Move) -> bool:
        """Whether all that was read is committed or stored, and the watermark says so."""
        subscription = move.subscription
        if self._watermarks.holds_back(subscription):
            move.beyond = subscription.window.seen
        elif not subscription.window.count and subscription.stored is subscription.window.watermark:
            return True
        else:
            self._ready_at = time.monotonic() + _PAUSE_SECONDS
        return False

    def _keep_all(self, subscription: Subscription) -> None:
        for index in list(subscription.window.waiting()):
            self._spilling.store(subscription, index, _REASON, bounded=False)

    def _are_heads_kept(self, subscription: Subscription, until: float) -> bool:
        """
        A change at which a partition halted may be stored by its execution alone; then it is marked like others.

        Returns:
            Whether that is done; not where the time did not suffice.
        """
        for tracker in subscription.trackers.values():
            image = tracker.image
            if image.was != "halted" or image.head is None:
                continue
            head = str(image.head["resumeToken"]["_data"])
            if (tracker.partition_id, head) in self._kept:
                continue
            if time.monotonic() > until:
                return False
            found = self._store.spill.fetch(tracker.partition_id, [head], self._session)
            if head in found:
                self._store.spill.insert(tracker.partition_id, found.values(), self._version, self._session)
                self._store.partitions.mark_spilled(tracker.partition_id, self._version, head, _REASON, self._session)
            self._kept.add((tracker.partition_id, head))
        return True

    def _begin_copying(self, moves: Sequence[_Move]) -> None:
        generations = {move.subscription.name: move.subscription.plan.layout.generation for move in moves}
        found: dict[str, list[Image]] = {name: [] for name in generations}
        for image in self._store.partitions.of(generations, self._session):
            if image.epoch == self._version and image.state == MOVING:
                found[image.subscription].append(image)
        for move in moves:
            images, plan = found[move.subscription.name], move.subscription.plan
            if len(images) != plan.layout.partitions:
                raise LeaseLostError
            rule = plan.handler.partitioner(self._options)
            parked: frozenset[int] = frozenset()
            if any(image.parked_keys for image in images):
                parked = self._store.partitions.parked_keys(plan.handler.name, plan.layout.generation, self._session)
            move.copying = Copying(self._store, move.subscription, images, move.layout, rule, self._session, parked)
            move.phase = _Phase.COPYING

    # -- copying, and putting in force -------------------------------------------------------------

    def _copy(self, until: float) -> list[_Move]:
        """Those that are done; each gets its turn."""
        done = []
        for move in self._in(_Phase.COPYING):
            assert move.copying is not None, "it was made when all was read"
            if move.copying.work(until):
                done.append(move)
        return done

    def _put_in_force(self, moves: list[_Move]) -> list[Subscription]:
        layouts = {move.subscription.name: move.layout for move in moves}
        marks = {move.subscription.name: move.subscription.window.watermark for move in moves}
        positions = {name: mark.token if mark is not None else None for name, mark in marks.items()}
        inherited = {
            where: fields for move in moves if move.copying for where, fields in move.copying.inherited.items()
        }
        self._store.partitions.prepare(positions, layouts, self._version, inherited)
        places = {name: mark.data if mark is not None else "" for name, mark in marks.items()}
        generations = generations_of(layouts)
        images = self._store.partitions.of(generations, self._session)
        if len(images) != sum(layout.partitions for layout in layouts.values()):
            raise LeaseLostError
        if len(self._store.subscriptions.put_in_force(layouts, self._version, places)) != len(layouts):
            raise LeaseLostError  # or somebody decided on a lost history meanwhile: the next term begins anew
        return [
            self._renewed(move, [image for image in images if image.subscription == move.subscription.name])
            for move in moves
        ]

    def _renewed(self, move: _Move, images: list[Image]) -> Subscription:
        """The subscription under its new layout; it goes on where the old one has ended."""
        old, layout = move.subscription, move.layout
        plan = replace(
            old.plan,
            layout=layout,
            partitioner=old.plan.handler.partitioner(self._options),
            watermark=old.window.watermark,
            undeliverable={},
        )
        ids = {
            image.index: self._store.partitions.partition_id(old.name, layout.generation, image.index)
            for image in images
        }
        trackers = make_trackers(images, ids, self._version, self._options)
        new = Subscription(self._options, plan, trackers)
        new.stored, new.has_gap, new.lost = old.stored, old.has_gap, old.lost
        if old.left is not None:
            new.until, new.left = old.until, old.left
            self._read_behind(new)
        del self._moves[old.name]
        logger.warning(
            "partition layout of %s changed: generation %d, %d partitions",
            old.name,
            layout.generation,
            layout.partitions,
            extra={"event": "layout_changed", "subscription": old.name},
        )
        return new

    def _read_behind(self, subscription: Subscription) -> None:
        """What it has left is read again; until then it takes in nothing, since it must miss nothing."""
        subscription.until = _place(subscription)
        if subscription not in self._behind:
            self._behind.append(subscription)

    # -- what is said ------------------------------------------------------------------------------

    def _complain(self, now: float) -> None:
        waiting = [move for move in self._moves.values() if move.waits]
        if not waiting or now - self._complained_at < _COMPLAINT_SECONDS:
            return
        self._complained_at = now
        for move in waiting:
            name = move.subscription.name
            logger.warning(
                "the new partition layout of handler %s %s; %s",
                name,
                move.waits,
                "until then its old partitions serve"
                if move.phase is _Phase.WAITING
                else "its other partitions wait, and other handlers go on",
                extra={"event": "layout_waits", "subscription": name},
            )

    def failed(self, error: PyMongoError) -> None:
        """Try again after a pause; raise what waiting cannot cure."""
        raise_if_final(error, self._concern)
        logger.warning(
            "preparing a new layout failed, trying again: %s", brief(error), extra={"event": "layout_failed"}
        )
        self._ready_at = time.monotonic() + _PAUSE_SECONDS


def _waits(move: _Move, line: CommandLine) -> str:
    """Why a subscription stays under its old layout for now; empty where nothing keeps it there."""
    subscription = move.subscription
    if subscription.lost:
        return _Phase.WAITING.value
    if move.layout.key == subscription.plan.layout.key:
        return ""
    if any(tracker.image.parked_keys for tracker in subscription.trackers.values()):
        return f"waits until no key is parked: `{line.changes('dead-letters', 'list', subscription.name)}` shows them"
    return ""


def _is_free(tracker: Tracker) -> bool:
    image = tracker.image
    return tracker.won and not image.live and image.handled is None


def _place(subscription: Subscription) -> Mark:
    """Up to where it has been read."""
    seen = subscription.window.seen
    return _mark({"_data": seen}) if seen else Mark({}, "", None)


def _needed(subscription: Subscription) -> Mark | None:
    """The place up to which it has to be read: no partition has committed, or halted at, anything behind it."""
    tokens = [tracker.image.token for tracker in subscription.trackers.values()]
    tokens += [tracker.image.head["resumeToken"] for tracker in subscription.trackers.values() if tracker.image.head]
    known = [token for token in tokens if token]
    return _mark(max(known, key=lambda token: str(token["_data"]))) if known else None


def _seeks_head(subscription: Subscription) -> bool:
    """Whether a partition stands by a change that was not read yet, and is not stored; only its counts are known."""
    return any(
        (tracker.image.was == "paused" or is_counted(tracker.image)) and not subscription.has_next(index)
        for index, tracker in subscription.trackers.items()
    )


def _mark(token: Mapping[str, Any]) -> Mark:
    return Mark(dict(token), str(token["_data"]), time_of_token(token, None))
