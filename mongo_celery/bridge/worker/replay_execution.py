"""
One execution of the replay of a dead letter: as that of a run, with other records (`state/replays.py` has the rules).

The claim is one of the partition, so nothing else runs there meanwhile; the counts are the letter's own; no position
moves. The letter goes when the handler has succeeded. When it has failed for good the letter stays with the new error,
whatever the handler's failure policy says.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import bson
from celery.exceptions import Ignore, SoftTimeLimitExceeded
from pymongo.errors import PyMongoError

from mongo_celery.bridge.change import Change
from mongo_celery.bridge.error_text import error_text, storable, traceback_text
from mongo_celery.bridge.fenced.fence import Fence
from mongo_celery.bridge.state.dead_letters import REPLAYS_MAX, Place
from mongo_celery.bridge.stream.source import strip_flags
from mongo_celery.bridge.worker.attribution import cause_text
from mongo_celery.bridge.worker.departure import is_leaving
from mongo_celery.bridge.worker.execution import Execution, SupersededError
from mongo_celery.bridge.worker.outcomes import SIGNALLED, WAITS, Outcomes, Waiting, attempts_in
from mongo_celery.bridge.worker.run_outcomes import RunOutcomes
from mongo_celery.errors import CommandRefusedError, StaleFencingTokenError

if TYPE_CHECKING:
    from datetime import datetime

    from bson.binary import Binary
    from celery.exceptions import Retry
    from pymongo.client_session import ClientSession

    from mongo_celery.bridge.state.claims import Claim
    from mongo_celery.bridge.state.dead_letters import Letter, ReplayRequest

logger = logging.getLogger("mongo_celery.worker")


OUTDATED = (
    "Changes that were handled since have written where this dead letter would put older data, or have left a stamp "
    "that stands for more than its document. Where its effect is still wanted, replay it with --over-newer; else "
    "discard it."
)
OVERTAKES = (
    "Its key is parked, and what waits for that comes first: replay or discard those dead letters, then replay this "
    "one."
)
KEPT = "Its handler has succeeded, but the dead letter cannot be removed; the worker's log says why. Discard it."


class ReplayOutcomes(RunOutcomes):
    """What becomes of a dead letter that was started again: a run of one change, which moves no position."""

    replay: ReplayRequest
    """What was started; set before the first outcome."""

    def wait(self, waiting: Waiting, what: str, error: BaseException) -> NoReturn:
        """As the original; it is the letter that waits, and no other change."""
        claim, replays = self._claim, self._wiring.store.replays
        delay, doubtful = WAITS.nth(claim.waits), waiting.doubts_max is not None
        logger.warning(
            "the replay of %s waits, next try in %.1f s: %s",
            what,
            delay,
            waiting.cause,
            extra={"event": "replay_waiting", "partition": claim.partition_id},
        )

        def wait(said: str) -> bool:
            return replays.wait(claim, self.replay.letter, said, delay=delay, doubtful=doubtful)

        ways = {"waiting": lambda: wait(storable(waiting.cause)), "waiting without cause": lambda: wait("not storable")}
        self._settle(ways)
        raise Ignore from error

    def park(self, retry: Retry, _raw: bytes, not_before: datetime | None, delay: float | None) -> NoReturn:
        """As the original; it is the letter that waits, and no other change."""
        given = isinstance(retry.exc, BaseException)
        text = error_text(retry.exc) if given else storable(str(retry.message or "retry"))
        replays, letter = self._wiring.store.replays, self.replay.letter
        ways = {
            "retry": lambda: replays.retry_later(self._claim, letter, text, delay=delay, not_before=not_before),
            "failure": lambda: self._fail("its retry cannot be stored; the worker's log says why.", "", 1),
        }
        self._settle(ways)
        raise retry

    def fail(self, error: Exception, raw: bytes) -> NoReturn:
        """Leave the letter with this error; always raises."""
        del raw
        if isinstance(error, StaleFencingTokenError):
            error = StaleFencingTokenError(OUTDATED)
        text, attempts = error_text(error), attempts_in(self._claim, error)
        plain = f"its failure ({type(error).__name__}) cannot be stored; the worker's log says why."
        self._settle(
            {
                "failure": lambda: self._fail(text, traceback_text(error), attempts),
                "failure without text": lambda: self._fail(plain, "", attempts),
            }
        )
        self._say_failed(text)
        raise error

    def give_way(self, first: Letter, hash_: int) -> NoReturn:
        """Let the letter that waits in front of this one for the same key come first; always raises."""
        claim, replays = self._claim, self._wiring.store.replays
        self._settle({"first of its key": lambda: replays.redirect(claim, self.replay, hash_)})
        logger.info(
            "the dead letter of %s waits behind that of %s for its key, which is replayed first",
            self.replay.key,
            first.key,
            extra={"event": "replay_redirected", "partition": claim.partition_id},
        )
        raise Ignore

    def _say_failed(self, text: str) -> None:
        logger.error(
            "the replay of %s has failed, and its dead letter stays: %s",
            self.replay.key,
            text,
            extra={"event": "replay_failed", "partition": self._claim.partition_id},
        )

    def _fail(self, text: str, traceback: str, attempts: int) -> bool:
        return self._wiring.store.replays.fail(self._claim, self.replay, text, traceback, attempts)

    def handled(self, last: int, raw: bytes) -> None:
        """The letter is of no use any more; one that cannot be removed stays, and its handler is not run again."""
        del last, raw
        claim, replays = self._claim, self._wiring.store.replays
        ways = {
            "handled": lambda: replays.succeed(claim, self.replay.letter),
            "failure": lambda: self._fail(KEPT, "", claim.retries + claim.crashes + 1),
        }
        if self._settle(ways) == "handled":
            _say_done(self.replay, claim)
        else:
            self._say_failed(KEPT)

    def crashed(self, error: BaseException, done: int = 0, *, is_counted: bool) -> None:
        """The process is about to end; a start without an outcome counts by itself, unless it is not counted."""
        del error, done
        try:
            if is_counted:
                self._wiring.store.claims.relinquish(self._claim.partition_id, self._claim.owner)
            elif is_leaving():
                self._wiring.store.replays.release(self._claim, self.replay.letter)
            else:
                claim, delay = self._claim, WAITS.nth(self._claim.waits)
                self._wiring.store.replays.wait(claim, self.replay.letter, SIGNALLED, delay=delay, doubtful=True)
        except PyMongoError:
            logger.warning(
                "could not record the crash of %s; its claim will lapse",
                self._claim.partition_id,
                extra={"event": "crash_not_recorded"},
            )


class ReplayExecution(Execution):
    """One delivery of a replay to a worker; arguments as of `Execution`."""

    _outcomes = ReplayOutcomes
    _replay: ReplayRequest | None = None
    _place: Place | None = None
    _token = 0

    @property
    def _recorded(self) -> int:
        """None: it moves no position."""
        return 0

    @property
    def _letter(self) -> str:
        assert self._run.letter is not None, "a replay names its letter"
        return self._run.letter

    def handle_in(self, session: ClientSession, change: Change) -> None:
        """The last writes of a transactional handler's transaction; SupersededError when a newer execution decides."""
        del change
        assert self.claim is not None, "a handler runs under a claim"
        if not self._store.replays.succeed(self.claim, self._letter, session):
            raise SupersededError

    def transaction_committed(self) -> None:
        """The letter is gone, by the transaction itself."""
        super().transaction_committed()
        assert self.claim is not None, "a handler runs under a claim"
        assert self._replay is not None, "and after its start was recorded"
        _say_done(self._replay, self.claim)

    def _take(self, owner: str, session: Binary | None) -> Claim | None:
        """A claim of the partition, and the record of this start; none for a message that has been used up."""
        run, replays = self._run, self._store.replays
        found = replays.find(self._letter)
        if found is None or found.failed or found.starts != run.starts or found.due_in > 0:
            return None
        claim = self._store.claims.take_for_replay(
            run.partition_id, self._letter, owner=owner, version=run.version, ttl=self._ttl, session=session
        )
        if claim is None:
            return None
        replay = self._replay = replays.start(claim, self._letter, run.starts)
        if replay is None:
            self._relinquish(owner)
            return None
        return replace(claim, retries=replay.retries, crashes=replay.crashes, waits=replay.waits, doubts=replay.doubts)

    def _load(self, outcomes: Outcomes) -> None:
        """Read the letter: its bytes, and the place at which a target finds its change."""
        claim, replay = self.claim, self._replay
        assert claim is not None, "a letter is read under a claim"
        assert replay is not None, "and after its start was recorded"
        assert isinstance(outcomes, ReplayOutcomes), "they are made from the class above"
        outcomes.replay = replay
        try:
            found = self._store.dead_letters.read(self._letter)
        except (PyMongoError, SoftTimeLimitExceeded) as error:
            outcomes.wait(Waiting(cause_text(error)), replay.key, error)
        if found is None:
            self._relinquish(claim.owner)
            raise Ignore
        letter, raw = found
        if letter.parked is not None:
            self._give_way(letter, letter.parked, outcomes)
        place = self._place = letter.place
        if raw is None or letter.token is None or place is None:
            outcomes.fail(CommandRefusedError("This dead letter is damaged: it can only be discarded."), b"")
        if _overtakes(letter, replay, claim):
            outcomes.fail(CommandRefusedError(OVERTAKES), raw)
        number = replay.starts
        if number > REPLAYS_MAX:
            outcomes.fail(CommandRefusedError(f"This dead letter has been started {REPLAYS_MAX} times."), raw)
        self._token = claim.fence if replay.over_newer else place.fence + number
        self._run = replace(self._run, changes=(raw,), token=letter.token)

    def _give_way(self, letter: Letter, hash_: int, outcomes: ReplayOutcomes) -> None:
        """End here where another letter waits for the same parked key in front of this one: that one comes first."""
        assert self._replay is not None, "its start was recorded"
        try:
            first = self._store.dead_letters.first_waiting(letter.subscription, hash_)
        except (PyMongoError, SoftTimeLimitExceeded) as error:
            outcomes.wait(Waiting(cause_text(error)), self._replay.key, error)
        if first is not None and first.document_id != letter.document_id:
            outcomes.give_way(first, hash_)

    def _is_parked(self, _offset: int) -> bool:
        """Whose key is parked is replayed all the same where it waits for that; `_load` has looked at all others."""
        return False

    def _bytes_of(self, _change: Change) -> bytes:
        return self._run.changes[0]

    def _change(self, _claim: Claim, raw: bytes, _offset: int) -> Change:
        event: Mapping[str, Any] = strip_flags(bson.decode(raw, self._codec))
        return Change(
            event,
            partition=self._run.index,
            seq=self._place.seq if self._place is not None else 0,
            fencing_token=self._token,
            replayed=True,
            _fence=self._fence_of,
            _named=self._wiring.collection,
            _view=self._view,
        )

    def _fence_of(self, change: Change) -> Fence:
        run, place = self._run, self._place
        key = f"{run.bridge}/{run.subscription}"
        if place is not None and self._replay is not None and not self._replay.over_newer:
            return Fence(key, place.generation, place.partition, change.fencing_token, self._origin_of(change))
        return Fence(key, run.generation, run.index, change.fencing_token)


def _overtakes(letter: Letter, replay: ReplayRequest, claim: Claim) -> bool:
    """Whether targets would refuse what waits for a letter's key, since this one, which does not, has a newer token."""
    return replay.over_newer and letter.parked is None and replay.hash in claim.parked


def _say_done(replay: ReplayRequest, claim: Claim) -> None:
    logger.info(
        "the dead letter of %s was replayed, and is removed",
        replay.key,
        extra={"event": "replay_done", "partition": claim.partition_id},
    )
