"""
Repartitioning: other partitions or another key for a handler, with the order per key preserved.

The old partitions serve until all read changes are handled. So the listener stops reading for the handler at a place,
and lets its partitions *drain*. Then only the watermark matters. One transaction removes the old partitions if they
still have no work, creates the new ones at the watermark, and puts the new partitioning in force
(`Partitions.replace`). It can be repeated.

A blocked partition would keep the handler waiting. So a drain begins only while none is halted, paused or in a long
retry, and no key is parked. Until then the old partitions continue, and `status` shows the reason for the delay. A
drain that takes too long is abandoned, and tried again after a pause. Other handlers never wait.
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
Time limit of a drain, in which finished partitions wait for the others.

Each further drain, and the pause before it, may take twice as long, up to ten minutes, because a run may.
"""

_TURN_SECONDS = 0.1
_POLL_SECONDS = 0.25
_PAUSE_SECONDS = 1.0
_READ_AGAIN_PAUSE = 1.0
_SOON_SECONDS = 5.0
_LONGEST_SECONDS = 600.0
_RULE_NEEDED = (
    "only the old rule shows which changes these partitions have handled. Deploy it again, with its options, until "
    "`status` shows nothing in flight and nothing blocked. Then deploy the new rule"
)


@dataclass(slots=True)
class _Move:
    """
    One handler in transition to another partitioning.

    Attributes:
        waits: the reason why it waits, as a sentence.
        drains_until: monotonic time limit of its drain. Infinite while it does not drain.
        ready_at: monotonic time of the next drain.
        seconds: time limit of the next drain, and of the pause after an abandoned one.
        is_unanswered: True if the switch may already be done, because an error interrupted it.
    """

    layout: Layout
    waits: str = "the listener is still reading the partitions"
    since: datetime = field(default_factory=lambda: datetime.now(UTC))
    drains_until: float = math.inf
    ready_at: float = 0.0
    seconds: float = DRAIN_SECONDS
    is_unanswered: bool = False


class Repartitioning:
    """
    The new partitionings of one term. The leading thread uses it.

    Args:
        wiring: the wiring of the bridge.
        watermarks: the watermarks of this term.
        storing: the storing of this term, whose session reads the images.
        snapshots: the snapshots of this term. A switch in the middle of a chunk would run all of it again.

    Attributes:
        due_at: monotonic time of the next turn with work.
    """

    def __init__(self, wiring: Wiring, watermarks: Watermarks, storing: Storing, snapshots: Snapshotting) -> None:
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
        self.due_at = self._read_again_at = 0.0
        self._throttle = LogThrottle()

    def begin(self, subscriptions: Mapping[str, Subscription], takeover: Takeover) -> list[Subscription]:
        """
        Take in this term's handlers before anything is read, and switch those with an unknown old rule.

        The new rule must not put anything into an old partition. So a handler that cannot be switched yet is stopped:
        nothing is read for it until the switch.

        Returns:
            Handlers under their new partitionings, which replace the old ones.

        Raises:
            LeaseLostError: the term has ended.
            MongoCeleryError: an error that waiting cannot fix.
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
            move.waits = move.waits or _describe_rest(subscription)
            logger.error(
                "handler %s is stopped until it has new partitions, and other handlers continue: %s",
                name,
                _describe_stop(subscription, move),
                extra={"event": "handler_stopped", "subscription": name},
            )
        return moved

    @property
    def stopped(self) -> dict[str, str]:
        """Return the stopped handlers, each with the reason."""
        moves = list(self._moves.items())
        return {name: _describe_stop(self._led[name], move) for name, move in moves if self._led[name].is_stopped}

    def turn(self, now: float) -> list[Subscription]:
        """
        Advance each handler in transition.

        Returns:
            Handlers under their new partitionings, which replace the old ones.

        Raises:
            LeaseLostError: the term has ended.
            MongoCeleryError: an error that waiting cannot fix.
        """
        if not self._moves and not self._rereading:
            self.due_at = math.inf
        if now < self.due_at:
            return []
        self.postpone(now)
        until, moved, names, turns = time.monotonic() + _TURN_SECONDS, [], list(self._moves), 0
        try:
            for name in names:
                turns += 1
                new = self._advance(self._led[name], self._moves[name], now)
                if new is not None:
                    moved.append(new)
                if time.monotonic() > until:
                    self.due_at = 0.0
                    break
        except PyMongoError as error:
            self.note_failure(error)
        order = [name for name in (*names[turns:], *names[:turns]) if name in self._moves]
        self._moves = {name: self._moves[name] for name in order}  # handlers without a turn are first in the next one
        self._complain()
        return moved

    def postpone(self, now: float) -> None:
        """Delay the next turn a little, after any result of this one."""
        self.due_at = now + _POLL_SECONDS

    def note_failure(self, error: PyMongoError) -> None:
        """Try again after a pause. Raise an error that waiting cannot fix."""
        raise_if_final(error, self._concern)
        logger.warning("repartitioning failed, trying again: %s", brief(error), extra={"event": "layout_failed"})
        self.due_at = time.monotonic() + _PAUSE_SECONDS

    def report(self) -> list[dict[str, Any]]:
        """Return the facts about handlers in transition for `status`."""
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
            if is_due and not self._snapshots.reads_again(subscription.name):
                _drain(subscription, move, now)
        elif now > move.drains_until:
            self._stop_draining(subscription, move, now + move.seconds)
            move.seconds = min(2 * move.seconds, _LONGEST_SECONDS)
        return None

    def _try_to_switch(self, subscription: Subscription, move: _Move, now: float) -> Subscription | None:
        """
        Switch if no work is left. Otherwise set `waits` to the work that must end first, or to empty.

        From then on the handler takes in nothing, so a switch with a lost answer can be repeated.
        """
        move.waits = "" if move.is_unanswered else self._obstacle(subscription)
        if move.is_unanswered or (not move.waits and self._is_drained(subscription)):
            if not subscription.is_draining:
                _drain(subscription, move, now)
            return self._switch(subscription, move)
        if subscription.lost and not move.waits:
            ways = (f"`{self._line.changes('reset', subscription.name, '--to', place)}`" for place in ("oldest", "now"))
            move.waits = f"the oplog no longer reaches its position. Decide where it continues: {' or '.join(ways)}"
        return None

    def _stop_draining(self, subscription: Subscription, move: _Move, ready_at: float) -> None:
        if move.drains_until == math.inf:
            return
        move.drains_until, move.ready_at = math.inf, ready_at
        self._rereading.append(subscription)

    def _is_drained(self, subscription: Subscription) -> bool:
        """Return True if all read changes are committed, and the watermark shows it."""
        window = subscription.window
        if window.count or subscription.in_flight or subscription.backlogs:
            return False
        if self._snapshots.holds(subscription.name):
            return False
        if window.seen != (window.watermark.data if window.watermark is not None else ""):
            return False  # no stream can be opened there
        if subscription.stored is not window.watermark and not subscription.lost:
            self._watermarks.store([subscription], time.monotonic())
        return subscription.stored is window.watermark

    def _obstacle(self, subscription: Subscription) -> str:
        """Describe the work that must end before a drain, or return an empty string if there is none."""
        images = [partition.image for partition in subscription.partitions.values()]
        marks = [backlog.to for _, backlog in subscription.backlogs]
        token = self._token(subscription)
        reached = max(subscription.window.seen, token_data(token) if token else "")
        if reached < max([*marks, *(image.data for image in images)], default=""):
            return _RULE_NEEDED if subscription.is_stopped else "the listener reads up to the last handled change"
        for index, partition in subscription.partitions.items():
            if not partition.won:
                return f"an open transaction locks partition {index}"
            obstacle = self._find_obstacle(subscription.name, partition.image)
            if obstacle:
                return f"partition {index} {obstacle}"
        return ""

    def _find_obstacle(self, name: str, image: Image) -> str:
        index, line = image.index, self._line
        if image.parked_keys:
            listed = line.changes("dead-letters", "list", name)
            return f"has {image.parked_keys} parked keys. Replay or discard their dead letters: `{listed}`"
        if image.state == "halted":
            return f"is halted. Fix the handler and run: `{line.on('retry', name, [index])}`"
        if image.state == "paused":
            return f"is paused. Run: `{line.on('resume', name, [index])}`"
        if image.due_in > _SOON_SECONDS:
            state = visible_state(image)
            command = line.on("retry", name, [index])
            return f"is {state}, and runs again in {image.due_in:.0f} s. To run it immediately: `{command}`"
        return ""

    # -- switching ---------------------------------------------------------------------------------

    def _switch(self, old: Subscription, move: _Move) -> Subscription | None:
        """Put the new partitions in force. Return None if an old one has work again."""
        partitions, layout, name = self._store.partitions, move.layout, old.name
        token, move.is_unanswered = self._token(old), True
        answer = partitions.replace(name, old.plan.layout, layout, token, self._version)
        if answer == "over":
            raise LeaseLostError
        if answer == "busy":
            move.is_unanswered = False
            return None  # a command came in between, which the next images show
        images = partitions.of({name: layout.term}, self._session)
        if len(images) != layout.partitions or any(image.term != self._version for image in images):
            raise LeaseLostError
        del self._moves[name]
        logger.warning(
            "the partitioning of %s has changed: term %d, %d partitions",
            name,
            layout.term,
            layout.partitions,
            extra={"event": "layout_changed", "subscription": name},
        )
        return self._renew(old, layout, images)

    def _token(self, subscription: Subscription) -> Mapping[str, Any] | None:
        """
        Return the token up to which everything is done. None if nothing was ever stored.

        A token from before the start is not a watermark, because no change is missing there. Partitions may be blocked
        there.
        """
        mark = subscription.window.watermark
        return mark.token if mark is not None else self._tokens[subscription.name]

    def _renew(self, old: Subscription, layout: Layout, images: list[Image]) -> Subscription:
        """Return the handler under its new partitioning. It begins at the end of the old one."""
        rule, watermark = old.plan.handler.partitioner(self._options), old.window.watermark
        plan = replace(old.plan, layout=layout, partitioner=rule, watermark=watermark, undeliverable={})
        partitions = make_partitions(images, self._store.partitions, layout.term, self._version, self._options)
        new = Subscription(self._options, plan, partitions)
        new.stored, new.has_gap, new.lost = old.stored, old.has_gap, old.lost
        new.is_draining = True  # until the rest is read again, because it must miss nothing
        self._rereading.append(new)
        return new

    # -- reading again -----------------------------------------------------------------------------

    def wants_reading(self, now: float) -> bool:
        """Return True if the stream must be read again from the handlers' places, because one has drained."""
        return bool(self._rereading) and now - self._read_again_at >= _READ_AGAIN_PAUSE

    def resume_reading(self, now: float) -> None:
        """Let the drained handlers take in later changes again."""
        self._read_again_at = now
        for subscription in self._rereading:
            subscription.is_draining = False
        self._rereading.clear()

    # -- messages ----------------------------------------------------------------------------------

    def _complain(self) -> None:
        if not self._moves or not self._throttle.may_log():
            return
        for name, move in self._moves.items():
            logger.warning(
                "%s waits for its %d new partitions: %s. Until then %s",
                name,
                move.layout.partitions,
                move.waits,
                "it is stopped" if self._led[name].is_stopped else "it uses the old ones",
                extra={"event": "layout_waits", "subscription": name},
            )


def _describe_stop(subscription: Subscription, move: _Move) -> str:
    rule = subscription.plan.layout.key.partition(":")[2]
    return f"its partitions were made by the rule {rule}, which no handler has any more: {move.waits}"


def _drain(subscription: Subscription, move: _Move, now: float) -> None:
    delay = subscription.plan.handler.delay or 0.0
    subscription.is_draining = True
    move.drains_until = now + min(move.seconds + delay, _LONGEST_SECONDS)


def _describe_rest(subscription: Subscription) -> str:
    """Describe the remaining work of a drain, and name its worker."""
    stored = f", stored changes of {len(subscription.backlogs)} partitions" if subscription.backlogs else ""
    claims = [(each.image.index, each.image.claim) for each in subscription.in_flight if each.image.claim]
    running = "".join(
        f", partition {index} runs in {describe_owner(str(claim['owner']))}" for index, claim in claims[:1]
    )
    return f"{subscription.window.count} changes are not handled yet{stored}{running}"
