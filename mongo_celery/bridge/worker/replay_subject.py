"""
The replay of a dead letter, as the subject of an execution (`state/replays.py` has the rules).

It claims the partition, so nothing else runs there meanwhile. The dead letter has its own counts, and no position
moves. If the handler succeeds, the dead letter is removed. If it fails permanently, the dead letter stays with the new
error, under every failure policy.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from celery.exceptions import Ignore, SoftTimeLimitExceeded
from pymongo.errors import PyMongoError

from mongo_celery.bridge.change import Change
from mongo_celery.bridge.fenced.fence import Fence
from mongo_celery.bridge.state.dead_letters import REPLAYS_MAX, Place, ReplayRequest
from mongo_celery.bridge.worker.attribution import cause_text
from mongo_celery.bridge.worker.outcome import NOT_STORABLE, Decision, Outcome, retry_text
from mongo_celery.bridge.worker.subject import Subject, count_attempts
from mongo_celery.errors import CommandRefusedError, StaleFencingTokenError
from mongo_celery.mongo.steps import Session, Steps
from mongo_celery.mongo.verdicts import error_text, traceback_text
from mongo_celery.signals import change_dead_lettered, send_signal

if TYPE_CHECKING:
    from datetime import datetime

    from bson.binary import Binary
    from celery.exceptions import Retry

    from mongo_celery.bridge.handlers import Handler
    from mongo_celery.bridge.state.claims import Claim
    from mongo_celery.bridge.wiring import Wiring
    from mongo_celery.bridge.worker.envelope import Run

logger = logging.getLogger("mongo_celery.worker")

OUTDATED = (
    "Later changes may already have written newer data than this dead letter has. To overwrite that data, replay the "
    "dead letter with --over-newer. Otherwise discard it."
)
OVERTAKES = (
    "The key of this dead letter is parked, and earlier dead letters of the key come first. Replay or discard those, "
    "then replay this one."
)
KEPT = (
    "The handler has succeeded, but this dead letter could not be removed. The worker's log has the reason. Discard "
    "the dead letter."
)


class ReplaySubject(Subject):
    """The change of one dead letter. Arguments as in `Subject`."""

    replays = True
    _request: ReplayRequest
    """Set by `take_claim`."""

    _place: Place
    """Set by `load`."""

    def __init__(self, wiring: Wiring, handler: Handler, run: Run, patience: float) -> None:
        super().__init__(wiring, handler, run, patience)
        self._fencing_tokens: dict[str, int] = {}  # by owner: an answer may be lost, and the claim taken again

    @property
    def _letter_id(self) -> str:
        assert self.run.dead_letter is not None, "a replay has the id of its dead letter"
        return self.run.dead_letter

    # -- what the handler gets -----------------------------------------------------------------------

    def take_claim(self, owner: str, ttl: float, session: Binary | None) -> Claim | None:
        """Claim the partition, and record this start. Return None for a message that was already used."""
        run, replays, claims = self.run, self._store.replays, self._store.claims
        found = replays.find(self._letter_id)
        if found is None or found.starts != run.starts or found.due_in > 0:
            return None
        claim = claims.take_for_replay(
            run.partition_id,
            self._letter_id,
            owner=owner,
            term=run.term,
            ttl=ttl,
            session=session,
            expected=run.fencing_token,
        )
        if claim is None:
            return None
        self._fencing_tokens[owner] = claim.fencing_token
        request = replays.start(claim, self._letter_id, run.starts)
        if request is None:
            claims.relinquish(run.partition_id, owner)
            return None
        self._request = request
        retries, crashes, waits, doubts = request.retries, request.crashes, request.waits, request.doubts
        return replace(claim, retries=retries, crashes=crashes, waits=waits, doubts=doubts)

    def relinquish(self, owner: str) -> bool:
        """End an unused claim. Its start is not counted as a crash."""
        self.withdraw(owner)
        return super().relinquish(owner)

    def withdraw(self, owner: str) -> bool:
        """Withdraw the crash that was or will be counted for a start in this process."""
        token = self._fencing_tokens.get(owner)
        return token is not None and self._store.replays.withdraw(self._letter_id, token)

    def load(self, claim: Claim) -> Decision:
        """Read the dead letter: its bytes, and the place at which targets compare its change."""
        request, first = self._request, None
        try:
            found = self._store.dead_letters.read(self._letter_id)
            if found is not None and found[0].parked is not None:
                first = self._store.dead_letters.first_waiting(found[0].subscription, found[0].parked)
        except (PyMongoError, SoftTimeLimitExceeded) as error:
            return self.wait(claim, self.describe(0), cause_text(error), error)
        if found is None:
            return [self.release(claim, Ignore())]
        letter, raw = found
        if first is not None and letter.parked is not None and first.document_id != letter.document_id:
            return [self._redirect(claim, letter.parked, first.key)]
        objection = None
        if raw is None or letter.token is None or letter.place is None:
            objection = "This dead letter is damaged, so it cannot be replayed. Discard it."
        elif request.over_newer and letter.parked is None and request.hash in claim.parked:
            objection = OVERTAKES  # targets would refuse waiting ones, because this one has a newer token
        elif request.starts > REPLAYS_MAX:
            objection = f"This dead letter has been started {REPLAYS_MAX} times, which is the limit. Discard it."
        else:
            self._place = letter.place
            self.run = replace(self.run, changes=(raw,), token=letter.token)
        return [] if objection is None else self.fail(claim, 0, CommandRefusedError(objection))

    def describe(self, offset: int) -> str:
        """Return the name of the change in logs."""
        del offset
        return f"the replay of {self._request.key}"

    def sequence_number(self, offset: int) -> int:
        """Return the number that the change had when it became a dead letter."""
        del offset
        return self._place.seq

    def token(self, claim: Claim) -> int:
        """Return the token reserved for this start. To overwrite newer data, return the claim's, which is newest."""
        return claim.fencing_token if self._request.over_newer else self._place.fencing_token + self._request.starts

    def fence(self, rewound: int, change: Change) -> Fence:
        """Return the fence at the place of the change. To overwrite newer data, return the fence of the claim."""
        key, run, place = f"{self.run.bridge}/{self.run.subscription}", self.run, self._place
        if self._request.over_newer:
            return Fence(key, run.partitioning, run.index, change.fencing_token)
        return Fence(key, place.term, place.partition, change.fencing_token, self._origin(0, rewound))

    # -- outcomes ----------------------------------------------------------------------------------

    def succeed(self, claim: Claim, end: int) -> Decision:
        """Remove the dead letter. If that fails, it stays, but its handler does not run again."""
        del end
        return [
            Outcome("handled", partial(self._store.replays.succeed, claim, self._letter_id), report=self._log_success),
            self._leave(claim, KEPT, "", claim.retries + claim.crashes + 1),
        ]

    def succeed_inside(self, session: Session, claim: Claim, end: int) -> Steps[bool]:
        """Remove the dead letter in the transaction of the handler."""
        del end
        return self._store.replays.succeed_inside(session, claim, self._letter_id)

    def fail(self, claim: Claim, offset: int, error: Exception) -> Decision:
        """Keep the dead letter with this error."""
        if isinstance(error, StaleFencingTokenError):
            error = StaleFencingTokenError(OUTDATED)
        attempts = count_attempts(claim, error)
        last = self.last_resort(claim, offset, f"its failure ({type(error).__name__})", error)
        return [self._leave(claim, error_text(error), traceback_text(error), attempts, error), last]

    def last_resort(self, claim: Claim, offset: int, what: str, error: BaseException) -> Outcome:
        """Return a failure outcome that stores no details of the error."""
        del offset
        return self._leave(claim, NOT_STORABLE.format(what), "", count_attempts(claim, error), error)

    def release(self, claim: Claim, raises: BaseException | None = None) -> Outcome:
        """Return the outcome that ends the claim. The dead letter may be started again immediately."""
        return Outcome("release", partial(self._store.replays.release, claim, self._letter_id), raises)

    def crash(self, claim: Claim, error: str) -> Outcome:
        """Return the outcome of a process that ends. A start without an outcome already counts."""
        del error
        return Outcome("crash", partial(self._store.claims.relinquish, claim.partition_id, claim.owner))

    def _leave(
        self, claim: Claim, text: str, traceback: str, attempts: int, raises: BaseException | None = None
    ) -> Outcome:
        write = partial(self._store.replays.fail, claim, self._request, text, traceback, attempts)
        return Outcome("failure", write, raises, partial(self._report_failure, text))

    def _redirect(self, claim: Claim, hash_: int, first: str) -> Outcome:
        """Return the outcome of a start that replays the key's first dead letter instead."""
        write = partial(self._store.replays.redirect, claim, self._request, hash_)
        return Outcome("redirect", write, Ignore(), partial(self._log_redirection, first))

    def _write_retry(self, claim: Claim, retry: Retry, not_before: datetime | None, delay: float | None) -> bool:
        letter, text = self._letter_id, retry_text(retry)
        return self._store.replays.retry_later(claim, letter, text, delay=delay, not_before=not_before)

    def _write_wait(self, claim: Claim, cause: str, delay: float, *, doubtful: bool) -> bool:
        return self._store.replays.wait(claim, self._letter_id, cause, delay=delay, doubtful=doubtful)

    # -- logs --------------------------------------------------------------------------------------

    def _log_success(self) -> None:
        logger.info(
            "the replay of %s has succeeded, and its dead letter is removed",
            self._request.key,
            extra={"event": "replay_done", "partition": self.run.partition_id},
        )

    def _report_failure(self, text: str) -> None:
        logger.error(
            "the replay of %s has failed. Its dead letter stays, as do later ones of the same key: %s",
            self._request.key,
            text,
            extra={"event": "replay_failed", "partition": self.run.partition_id},
        )
        run, letter = self.run, self._letter_id.split("/", 2)[-1]
        send_signal(
            change_dead_lettered,
            run.bridge,
            handler=run.subscription,
            partition=run.index,
            key=self._request.key,
            reason="replay_failed",
            error=text,
            dead_letter=letter,
            command=self._wiring.line.changes("dead-letters", "list", "--id", letter),
        )

    def _log_redirection(self, first: str) -> None:
        logger.info(
            "the dead letter of %s waits, because an earlier one of its key, %s, is replayed first",
            self._request.key,
            first,
            extra={"event": "replay_redirected", "partition": self.run.partition_id},
        )
