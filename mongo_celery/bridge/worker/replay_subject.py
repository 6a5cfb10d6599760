"""
The replay of a dead letter, as the subject of an execution (`state/replays.py` has the rules).

The claim is one of the partition, so nothing else runs there meanwhile. The counts are the dead letter's own, and no
position moves. The dead letter is removed when the handler has succeeded. If the handler has failed permanently, it
stays with the new error, whatever the failure policy says.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from celery.exceptions import Ignore, SoftTimeLimitExceeded
from pymongo.errors import PyMongoError

from mongo_celery.bridge.change import Change
from mongo_celery.bridge.fenced.fence import Fence
from mongo_celery.bridge.state.dead_letters import REPLAYS_MAX, Place, ReplayRequest
from mongo_celery.bridge.worker.attribution import cause_text
from mongo_celery.bridge.worker.outcome import (
    NOT_STORABLE,
    Crashed,
    Decision,
    Handled,
    Outcome,
    Redirected,
    Released,
    ReplayFailed,
    Retrying,
    Waiting,
    retry_text,
)
from mongo_celery.bridge.worker.subject import Subject, count_attempts
from mongo_celery.errors import CommandRefusedError, StaleFencingTokenError
from mongo_celery.mongo.verdicts import error_text, traceback_text

if TYPE_CHECKING:
    from bson.binary import Binary
    from pymongo.client_session import ClientSession

    from mongo_celery.bridge.state.claims import Claim

logger = logging.getLogger("mongo_celery.worker")

OUTDATED = (
    "Later changes have already written where this dead letter would write older data, or have left a stamp that "
    "covers more than its document. To write over them, replay it with --over-newer; else discard it."
)
OVERTAKES = (
    "Its key is parked, and the dead letters that wait for that come first: replay or discard those, then replay this "
    "one."
)
KEPT = "Its handler has succeeded, but the dead letter cannot be removed; the worker's log says why. Discard it."


class ReplaySubject(Subject):
    """The change of one dead letter. Arguments as of `Subject`."""

    replays = True
    _request: ReplayRequest
    """Set by `take_claim`."""

    _place: Place
    """Set by `load`."""

    @property
    def _letter_id(self) -> str:
        assert self.run.dead_letter is not None, "a replay names its dead letter"
        return self.run.dead_letter

    # -- what is given -----------------------------------------------------------------------------

    def take_claim(self, owner: str, ttl: float, session: Binary | None) -> Claim | None:
        """Claim the partition, and record this start. None for a message that has been used up."""
        run, replays, claims = self.run, self._store.replays, self._store.claims
        found = replays.find(self._letter_id)
        if found is None or found.failed or found.starts != run.starts or found.due_in > 0:
            return None
        claim = claims.take_for_replay(
            run.partition_id, self._letter_id, owner=owner, term=run.version, ttl=ttl, session=session
        )
        if claim is None:
            return None
        request = replays.start(claim, self._letter_id, run.starts)
        if request is None:
            claims.relinquish(run.partition_id, owner)
            return None
        self._request = request
        retries, crashes, waits, doubts = request.retries, request.crashes, request.waits, request.doubts
        return replace(claim, retries=retries, crashes=crashes, waits=waits, doubts=doubts)

    def load(self, claim: Claim) -> Decision:
        """Read the dead letter: its bytes, and the place at which a target finds its change."""
        request, first = self._request, None
        try:
            found = self._store.dead_letters.read(self._letter_id)
            if found is not None and found[0].parked is not None:
                first = self._store.dead_letters.first_waiting(found[0].subscription, found[0].parked)
        except (PyMongoError, SoftTimeLimitExceeded) as error:
            return self.wait(claim, self.describe(0), cause_text(error), error)
        if found is None:
            return [Released(raises=Ignore())]
        letter, raw = found
        if first is not None and letter.parked is not None and first.document_id != letter.document_id:
            return [Redirected(letter.parked, first.key, raises=Ignore())]
        objection = None
        if raw is None or letter.token is None or letter.place is None:
            objection = "This dead letter is damaged: it can only be discarded."
        elif request.over_newer and letter.parked is None and request.hash in claim.parked:
            objection = OVERTAKES  # targets would refuse those that wait: this one has a newer token
        elif request.starts > REPLAYS_MAX:
            objection = f"This dead letter has been started {REPLAYS_MAX} times."
        else:
            self._place = letter.place
            self.run = replace(self.run, changes=(raw,), token=letter.token)
        return [] if objection is None else self.fail(claim, 0, CommandRefusedError(objection))

    def describe(self, offset: int) -> str:
        """Return how logs name the change."""
        del offset
        return f"the replay of {self._request.key}"

    def sequence_number(self, offset: int) -> int:
        """Return the number that the change had when it became a dead letter."""
        del offset
        return self._place.seq

    def token(self, claim: Claim) -> int:
        """Return the token that was kept free for this start. Over newer data the claim's own, which is the newest."""
        return claim.fencing_token if self._request.over_newer else self._place.fencing_token + self._request.starts

    def fence(self, offset: int, rewound: int, change: Change) -> Fence:
        """Return the fence at the place of the change. Over newer data that of the claim."""
        key, run, place = f"{self.run.bridge}/{self.run.subscription}", self.run, self._place
        if self._request.over_newer:
            return Fence(key, run.generation, run.index, change.fencing_token)
        return Fence(key, place.term, place.partition, change.fencing_token, self._origin(offset, rewound))

    # -- outcomes ----------------------------------------------------------------------------------

    def fail(self, claim: Claim, offset: int, error: Exception) -> Decision:
        """Leave the dead letter with this error."""
        del offset
        if isinstance(error, StaleFencingTokenError):
            error = StaleFencingTokenError(OUTDATED)
        attempts = count_attempts(claim, error)
        plain = NOT_STORABLE.format(f"its failure ({type(error).__name__})")
        return [
            ReplayFailed(error_text(error), traceback_text(error), attempts, raises=error),
            ReplayFailed(plain, "", attempts, raises=error),
        ]

    def succeed(self, claim: Claim, end: int) -> Decision:
        """Remove the dead letter. One that cannot be removed stays, and its handler is not run again."""
        return [Handled(end), ReplayFailed(KEPT, "", claim.retries + claim.crashes + 1)]

    def last_resort(self, offset: int, what: str, error: BaseException) -> Outcome:
        """Return a failure that stores nothing of its error."""
        del offset
        return ReplayFailed(NOT_STORABLE.format(what), "", 1, raises=error)

    def write(  # noqa: PLR0911 - one update for each outcome
        self, claim: Claim, outcome: Outcome, session: ClientSession | None = None
    ) -> bool:
        """Write an outcome into the dead letter. The claim ends with it."""
        replays, letter = self._store.replays, self._letter_id
        match outcome:
            case Handled():
                return replays.succeed(claim, letter, session)
            case Retrying(retry, not_before, delay):
                return replays.retry_later(claim, letter, retry_text(retry), delay=delay, not_before=not_before)
            case Waiting(cause, is_doubtful, delay):
                return replays.wait(claim, letter, cause, delay=delay, doubtful=is_doubtful)
            case ReplayFailed(text, traceback, attempts):
                return replays.fail(claim, self._request, text, traceback, attempts)
            case Redirected(hash_):
                return replays.redirect(claim, self._request, hash_)
            case Crashed():  # a start without an outcome counts by itself
                return self._store.claims.relinquish(claim.partition_id, claim.owner)
            case Released():
                return replays.release(claim, letter)
        raise TypeError(f"a replay has no outcome {outcome}")

    def log_outcome(self, outcome: Outcome) -> None:
        """Log the end of the replay."""
        key, partition = self._request.key, self.run.partition_id
        match outcome:
            case Handled():
                logger.info(
                    "the dead letter of %s was replayed, and is removed",
                    key,
                    extra={"event": "replay_done", "partition": partition},
                )
            case ReplayFailed(text):
                logger.error(
                    "the replay of %s has failed, and its dead letter stays: %s",
                    key,
                    text,
                    extra={"event": "replay_failed", "partition": partition},
                )
            case Redirected(_, first):
                logger.info(
                    "the dead letter of %s waits behind that of %s for its key, which is replayed first",
                    key,
                    first,
                    extra={"event": "replay_redirected", "partition": partition},
                )
