"""Storing where refused changes stand, before anything that was read behind them is dispatched (see `admission`)."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection
from typing import TYPE_CHECKING

from pymongo.errors import PyMongoError

from mongo_celery.bridge.listener.subscription import Subscription
from mongo_celery.errors import LeaseLostError
from mongo_celery.mongo.verdicts import Concern, brief, raise_if_final

if TYPE_CHECKING:
    from mongo_celery.bridge.state.subscriptions import Subscriptions

logger = logging.getLogger("mongo_celery.listener")

_PAUSE = 1.0


class Noting:
    """
    The notes of one term.

    One failure ends a round, so that a server that does not answer costs the leading thread one call and no more; the
    next round begins after a pause, with those who have not failed, or not for the longest time.

    Args:
        stored: the subscriptions' documents.
        concern: whom an error of theirs concerns.
    """

    def __init__(self, stored: Subscriptions, concern: Concern) -> None:
        self._stored = stored
        self._concern = concern
        self._ready_at = 0.0
        self._failed_at: dict[str, float] = {}

    def note(self, led: Collection[Subscription], now: float) -> None:
        """
        Store what is not stored yet; a subscription that waits for it dispatches nothing.

        Raises:
            LeaseLostError: the term has ended.
            MongoCeleryError: something that waiting cannot cure.
        """
        if now < self._ready_at:
            return
        pending = [subscription for subscription in led if not subscription.admission.is_noted]
        for subscription in sorted(pending, key=lambda each: self._failed_at.get(each.name, 0.0)):
            try:
                self._note(subscription)
            except PyMongoError as error:
                self._failed(subscription, error)
                return

    def due(self, led: Collection[Subscription]) -> float:
        """Monotonic time of the next round; infinite where nothing is left to store."""
        return math.inf if all(subscription.admission.is_noted for subscription in led) else self._ready_at

    def _note(self, subscription: Subscription) -> None:
        notes = subscription.notes_of_refused()
        if not self._stored.note_refused(
            subscription.name,
            subscription.plan.version,
            notes.generation,
            notes.changes,
            replace=notes.is_all,
        ):
            raise LeaseLostError
        subscription.admission.noted(notes)

    def _failed(self, subscription: Subscription, error: PyMongoError) -> None:
        raise_if_final(error, self._concern)
        logger.warning(
            "noting refused changes of handler %s failed, trying again: %s",
            subscription.name,
            brief(error),
            extra={"event": "refusals_unrecorded"},
        )
        now = time.monotonic()  # after the call, which may have taken longer than the pause
        self._failed_at[subscription.name] = now
        self._ready_at = now + _PAUSE
