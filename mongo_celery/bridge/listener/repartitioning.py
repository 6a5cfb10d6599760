"""
Repartitioning: other partitions for a handler, or another key, with order per key kept.

The old partitions serve until everything that was read has been handled. So the listener stops reading for the handler
at a place, and lets its partitions *drain*. Then all that is known of them is the watermark. Three steps replace them:

1. one transaction removes the old partitions, if they still have nothing to do (`Partitions.retire`),
2. one guarded write on the subscription puts the new partitioning in force,
3. the new partitions are made, at the watermark.

A take-over makes whatever partitions are missing in the same way. So a crash after step 1 leaves the old partitioning
in force, and a crash after step 2 the new one. Each step can be repeated.

A blocked partition would keep the handler waiting. So a drain begins only while none is halted, paused or retrying for
long, and no key is parked. Until then the old partitions continue, and `status` says for what the new ones wait. A
drain that takes too long is given up, and tried again after a pause. Other handlers never wait.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from pymongo.errors import PyMongoError

from mongo_celery.bridge.change import token_data
from mongo_celery.bridge.existing import opens_stream
from mongo_celery.bridge.listener.pacing import LogThrottle
from mongo_celery.bridge.listener.subscription import Subscription, make_partitions
from mongo_celery.bridge.listener.takeover import Takeover
from mongo_celery.bridge.state.claims import describe_owner
from mongo_celery.bridge.state.partitions import Image, visible_state
from mongo_celery.bridge.state.subscriptions import Layout
from mongo_celery.errors import LeaseLostError
from mongo_celery.mongo.verdicts import brief, raise_if_final

if TYPE_CHECKING:
    from mongo_celery.bridge.listener.snapshotting import Snapshotting
    from mongo_celery.bridge.listener.storing import Storing
    from mongo_celery.bridge.listener.watermarks import Watermarks
    from mongo_celery.bridge.wiring import Wiring

logger = logging.getLogger("mongo_celery.listener")

DRAIN_SECONDS = 60.0
"""
A drain that takes longer is given up: partitions with nothing left to do wait for the others.

Each further drain, and the pause before it, may take twice as long, up to ten minutes: so may a run.
"""

_TURN_SECONDS = 0.1
_POLL_SECONDS = 0.25
_PAUSE_SECONDS = 1.0
_READ_AGAIN_PAUSE = 1.0
_SOON_SECONDS = 5.0
_LONGEST_SECONDS = 600.0
_RULE_NEEDED = (
    "some are ahead of others, and by that rule alone it is known which changes they have done. Deploy it again, with "
    "the options that it needs, until `status` shows nothing outstanding and nothing blocked. Then change it"
)


@dataclass(slots=True)
class _Move:
    """
    One handler on its way to another partitioning.

    Attributes:
        waits: for what, as a sentence.
        drains_until: monotonic time at which its drain is given up. Infinite while it does not drain.
        ready_at: monotonic time of the next drain.
        seconds: how long the next drain may take, and the pause after it where it is given up.
        is_retiring: whether the old partitions may be gone already, since an error has interrupted the switch.
    """

    layout: Layout
    waits: str = "the listener reads partitions"
    since: datetime = field(default_factory=lambda: datetime.now(UTC))
    drains_until: float = math.inf
    ready_at: float = 0.0
    seconds: float = DRAIN_SECONDS
    is_retiring: bool = False


class Repartitioning:
    """
    The new partitionings of one term. Used by the leading thread.

    Args:
        wiring: of the bridge.
        watermarks: of this term.
        storing: in its session images are read.
        snapshots: of this term: a switch in the middle of a chunk would have all of it run again.
    """

    def __init__(
        self, wiring: Wiring, watermarks: Watermarks, storing: Storing, snapshots: Snapshotting | None = None
    ) -> None:
        self._snapshots = snapshots
        self._store, self._options, self._line = wiring.store, wiring.options, wiring.line
        self._concern = wiring.state_concern
        self._watermarks = watermarks
        self._session = storing.session
        self._version = 0
        self._led: Mapping[str, Subscription] = {}
        self._moves: dict[str, _Move] = {}
        self._tokens: Mapping[str, Mapping[str, Any] | None] = {}
        self._rereading: list[Subscription] = []
        self._next_at = self._read_again_at = 0.0
        self._throttle = LogThrottle()

    def begin(self, subscriptions: Mapping[str, Subscription], takeover: Takeover) -> list[Subscription]:
        """
        Take in the handlers of this term, before anything is read, and switch those whose old rule is not known.

        By the new rule nothing may be put into an old partition. So one that cannot be switched yet is stopped: nothing
        is read for it until it is.

        Returns:
            Handlers under their new partitionings, which take the place of the old ones.

        Raises:
            LeaseLostError: the term has ended.
            MongoCeleryError: something that waiting cannot fix.
        """
        self._led, self._version = subscriptions, takeover.version
        self._moves = {name: _Move(takeover.wanted[name]) for name in takeover.moving if name in subscriptions}
        self._tokens = {name: takeover.documents[name].get("resumeToken") for name in self._moves}
        moved = []
        for name, move in list(self._moves.items()):
            subscription, now = subscriptions[name], time.monotonic()
            if not subscription.is_stopped:
                continue
            new = None
            try:
                new = self._try_to_switch(subscription, move, now)
            except PyMongoError as error:  # `turn` tries again
                self.note_failure(error)
            if new is not None:
                moved.append(new)
                continue
            _drain(subscription, move, now)
            subscription.has_left = True  # nothing is read for it
            move.waits = move.waits or _describe_rest(subscription)
            logger.error(
                "handler %s is stopped until its partitions are replaced, and the others are led: %s",
                name,
                _describe_stop(subscription, move),
                extra={"event": "handler_stopped", "subscription": name},
            )
        return moved

    @property
    def stopped(self) -> dict[str, str]:
        """The handlers that are stopped, and for what each one waits."""
        moves = list(self._moves.items())
        return {name: _describe_stop(self._led[name], move) for name, move in moves if self._led[name].is_stopped}

    def due(self) -> float:
        """Return the monotonic time of the next turn that may have something to do. Infinite without one."""
        return self._next_at if self._moves or self._rereading else math.inf

    def turn(self, now: float) -> list[Subscription]:
        """
        Go on with each handler that is on its way.

        Returns:
            Handlers under their new partitionings, which take the place of the old ones.

        Raises:
            LeaseLostError: the term has ended.
            MongoCeleryError: something that waiting cannot fix.
        """
        if now < self._next_at:
            return []
        self.postpone(now)
        until, moved = time.monotonic() + _TURN_SECONDS, []
        try:
            for name in list(self._moves):
                new = self._advance(self._led[name], self._moves[name], now)
                if new is not None:
                    moved.append(new)
                if time.monotonic() > until:
                    self._next_at = 0.0
                    break
        except PyMongoError as error:
            self.note_failure(error)
        self._complain()
        return moved

    def postpone(self, now: float) -> None:
        """Have the next turn come a little later, whatever came of this one."""
        self._next_at = now + _POLL_SECONDS

    def note_failure(self, error: PyMongoError) -> None:
        """Try again after a pause. Raise what waiting cannot fix."""
        raise_if_final(error, self._concern)
        logger.warning("repartitioning failed, trying again: %s", brief(error), extra={"event": "layout_failed"})
        self._next_at = time.monotonic() + _PAUSE_SECONDS

    def report(self) -> list[dict[str, Any]]:
        """Return what `status` shows of handlers on their way to another partitioning."""
        return [
            {"subscription": name, "partitions": move.layout.partitions, "since": move.since, "waits": move.waits}
            for name, move in list(self._moves.items())
        ]

    # -- draining ----------------------------------------------------------------------------------

    def _advance(self, subscription: Subscription, move: _Move, now: float) -> Subscription | None:
        new = self._try_to_switch(subscription, move, now)
        if new is not None:
            return new
        if subscription.is_stopped:
            move.waits = move.waits or _describe_rest(subscription)
            return None
        if move.waits:
            self._stop_draining(subscription, move, now + _SOON_SECONDS)
            return None
        move.waits = _describe_rest(subscription)
        if move.drains_until == math.inf:
            is_due = now >= move.ready_at and not subscription.is_draining and opens_stream(subscription.window.seen)
            if is_due and not (self._snapshots is not None and self._snapshots.reads_again(subscription.name)):
                _drain(subscription, move, now)
        elif now > move.drains_until:
            self._stop_draining(subscription, move, now + move.seconds)
            move.seconds = min(2 * move.seconds, _LONGEST_SECONDS)
        return None

    def _try_to_switch(self, subscription: Subscription, move: _Move, now: float) -> Subscription | None:
        """
        Switch if nothing is left to do. Else `waits` is what has to be settled first, empty for nothing.

        A handler takes in nothing from then on, so that a switch whose answer was lost can be repeated.
        """
        move.waits = "" if move.is_retiring else self._obstacle(subscription)
        if move.is_retiring or (not move.waits and self._is_drained(subscription)):
            if not subscription.is_draining:
                _drain(subscription, move, now)
            return self._switch(subscription, move)
        if subscription.lost and not move.waits:
            ways = (self._line.changes("reset", subscription.name, "--to", place) for place in ("oldest", "now"))
            move.waits = f"its oplog history is lost. Decide: {' or '.join(ways)}"
        return None

    def _stop_draining(self, subscription: Subscription, move: _Move, ready_at: float) -> None:
        if move.drains_until == math.inf:
            return
        move.drains_until, move.ready_at = math.inf, ready_at
        subscription.is_draining = subscription.has_left
        if subscription.has_left:
            self._rereading.append(subscription)

    def _is_drained(self, subscription: Subscription) -> bool:
        """Return True if all that was read is committed, and the watermark says so."""
        window = subscription.window
        if window.count or subscription.in_flight or subscription.backlogs:
            return False
        if self._snapshots is not None and self._snapshots.holds(subscription.name):
            return False
        if window.seen != (window.watermark.data if window.watermark is not None else ""):
            return False  # no stream can be opened there
        if subscription.stored is not window.watermark and not subscription.lost:
            self._watermarks.store([subscription], time.monotonic())
        return subscription.stored is window.watermark

    def _obstacle(self, subscription: Subscription) -> str:
        """Return what has to be settled before a drain. Empty where nothing has."""
        images = [partition.image for partition in subscription.partitions.values()]
        marks = [backlog.to for _, backlog in subscription.backlogs]
        token = self._token(subscription)
        reached = max(subscription.window.seen, token_data(token) if token else "")
        if reached < max([*marks, *(image.data for image in images)], default=""):
            return _RULE_NEEDED if subscription.is_stopped else "it reads up to what its partitions have done"
        for index, partition in subscription.partitions.items():
            if not partition.won:
                return f"an open transaction has locked partition {index}"
            obstacle = self._find_obstacle(subscription.name, partition.image)
            if obstacle:
                return f"partition {index} {obstacle}"
        return ""

    def _find_obstacle(self, name: str, image: Image) -> str:
        index, line = image.index, self._line
        if image.parked_keys:
            listed = line.changes("dead-letters", "list", name)
            return f"has {image.parked_keys} parked keys. Replay or discard their dead letters: {listed}"
        if image.state == "halted":
            return f"is halted. Fix the handler and run: {line.on('retry', name, [index])}"
        if image.state == "paused":
            return f"is paused. Run: {line.on('resume', name, [index])}"
        if image.due_in > _SOON_SECONDS:
            state = visible_state(image)
            return f"is {state}, next in {image.due_in:.0f} s. To run it now: {line.on('retry', name, [index])}"
        return ""

    # -- switching ---------------------------------------------------------------------------------

    def _switch(self, old: Subscription, move: _Move) -> Subscription | None:
        """Put the new partitions in force. None where an old one has something to do again."""
        store, layout, name = self._store, move.layout, old.name
        token, move.is_retiring = self._token(old), True
        given = store.partitions.retire(name, old.plan.layout, token, self._version)
        if given is None:
            found = store.subscriptions.affirm([name], self._version)[name]
            if found["term"] != self._version:
                raise LeaseLostError
            move.is_retiring = False
            return None  # a command came in between: the next images show it
        if not store.subscriptions.activate_layout(name, layout, self._version):
            raise LeaseLostError
        seen = (partition.image.fencing_token for partition in old.partitions.values())
        largest = max([given, *seen])  # no token is given twice
        store.partitions.prepare({name: token}, {name: layout}, self._version, fencing_token=largest)
        images = store.partitions.of({name: layout.term}, self._session)
        if len(images) != layout.partitions or any(image.term != self._version for image in images):
            raise LeaseLostError
        del self._moves[name]
        logger.warning(
            "partitioning of %s changed: generation %d, %d partitions",
            name,
            layout.term,
            layout.partitions,
            extra={"event": "layout_changed", "subscription": name},
        )
        return self._renew(old, layout, images)

    def _token(self, subscription: Subscription) -> Mapping[str, Any] | None:
        """
        Return that of the place up to which all is done. None where nothing was ever stored.

        One that is stored before the start is no watermark, since nothing is owed there. Partitions may be blocked
        there.
        """
        mark = subscription.window.watermark
        return mark.token if mark is not None else self._tokens[subscription.name]

    def _renew(self, old: Subscription, layout: Layout, images: list[Image]) -> Subscription:
        """The handler under its new partitioning. It begins where the old one has ended."""
        rule, watermark = old.plan.handler.partitioner(self._options), old.window.watermark
        plan = replace(old.plan, layout=layout, partitioner=rule, watermark=watermark, undeliverable={})
        partitions = make_partitions(images, self._store.partitions, layout.term, self._version, self._options)
        new = Subscription(self._options, plan, partitions)
        new.stored, new.has_gap, new.lost = old.stored, old.has_gap, old.lost
        if old.has_left:  # it takes in nothing until that is read again, since it must miss nothing
            new.is_draining = new.has_left = True
            self._rereading.append(new)
        return new

    # -- reading again -----------------------------------------------------------------------------

    def wants_reading(self, now: float) -> bool:
        """Return True if the stream should be read again from where the handlers are: one has left something."""
        return bool(self._rereading) and now - self._read_again_at >= _READ_AGAIN_PAUSE

    def resume_reading(self, now: float) -> None:
        """Let the handlers that have left something take in what comes from now on."""
        self._read_again_at = now
        for subscription in self._rereading:
            subscription.is_draining = subscription.has_left = False
        self._rereading.clear()

    # -- messages ----------------------------------------------------------------------------------

    def _complain(self) -> None:
        if not self._moves or not self._throttle.may_log():
            return
        for name, move in self._moves.items():
            logger.warning(
                "%s waits for its %d partitions: %s. Until then %s",
                name,
                move.layout.partitions,
                move.waits,
                "it is stopped" if self._led[name].is_stopped else "the old ones serve",
                extra={"event": "layout_waits", "subscription": name},
            )


def _describe_stop(subscription: Subscription, move: _Move) -> str:
    rule = subscription.plan.layout.key.partition(":")[2]
    return f"its partitions are by the rule {rule}, which no handler has any more: {move.waits}"


def _drain(subscription: Subscription, move: _Move, now: float) -> None:
    subscription.is_draining, move.drains_until = True, now + move.seconds


def _describe_rest(subscription: Subscription) -> str:
    """Name what a drain has left to do, and who has it in hand."""
    stored = f", stored changes of {len(subscription.backlogs)} partitions" if subscription.backlogs else ""
    claims = [(each.image.index, each.image.claim) for each in subscription.in_flight if each.image.claim]
    running = "".join(
        f", partition {index} runs in {describe_owner(str(claim['owner']))}" for index, claim in claims[:1]
    )
    return f"{subscription.window.count} changes are left to handle{stored}{running}"
