"""
The outcomes of one execution: each is written under its claim, and guarded by its fence.

An outcome that is refused ends the execution quietly, because a newer one decides. One that cannot be stored falls
back, step by step, to a halt with a plain text. One that MongoDB does not answer for is written later, by the process
(`deferred`), so that an outage is charged to no change.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import pymongo
from celery.exceptions import Ignore, SoftTimeLimitExceeded
from pymongo.errors import PyMongoError

from mongo_celery.bridge.change import describe, token_data
from mongo_celery.bridge.error_text import error_text, storable, traceback_text
from mongo_celery.bridge.existing import is_unread, letter_name
from mongo_celery.bridge.state.claims import PARKED_MAX
from mongo_celery.bridge.state.dead_letters import (
    FAILED,
    PARKED,
    PARKED_BEHIND,
    SKIPPED,
    KeptChange,
    Place,
    dead_letter,
    forms_of,
)
from mongo_celery.bridge.state.spill import StoredChange
from mongo_celery.bridge.worker.deferred import DeferredWrites
from mongo_celery.bridge.worker.departure import is_leaving
from mongo_celery.bridge.worker.runtime import WorkerRuntime
from mongo_celery.errors import HandlerCrashedError, RefusedChangeError
from mongo_celery.mongo.repeating import Pauses, until_answered
from mongo_celery.mongo.verdicts import is_transient

if TYPE_CHECKING:
    from datetime import datetime

    from celery.exceptions import Retry

    from mongo_celery.bridge.handlers import Handler
    from mongo_celery.bridge.state.claims import Claim
    from mongo_celery.bridge.wiring import Wiring
    from mongo_celery.bridge.worker.envelope import Run
    from mongo_celery.bridge.worker.heartbeat import Heartbeat

logger = logging.getLogger("mongo_celery.worker")

ANSWER_SECONDS = 30.0
"""How long an execution itself waits for MongoDB to take its outcome."""

_STORING_SECONDS = 2.0
_PAUSES = Pauses(first=0.05, longest=1.0)
SIGNALLED = "its worker's process was ended by a signal, in no shutdown of the worker"
WAITS = Pauses(first=0.5, longest=30.0, jitter=0.25)
"""Between two attempts of a change that waits, and of which nothing is counted."""

_KEEPING = {"dead_letter": FAILED, "skip": SKIPPED, "park_key": PARKED}
_BEHIND = "Its key is parked: it waits behind an earlier change, and its handler was not started."
_FULL = (
    "{count} keys of this partition are parked, and there can be no more. Look at them with `{look}`, replay "
    "or discard some, then run `{retry}`. The handler's error: {error}"
)


def persisted(write: Callable[[], bool], what: str, seconds: float = ANSWER_SECONDS) -> bool:
    """
    Write to the state, for a bounded time again and again while there is no answer; whether it was accepted.

    Raises:
        PyMongoError: what the last attempt said, or what repeating cannot cure.
    """
    return until_answered(
        write,
        deadline=time.monotonic() + seconds,
        pauses=_PAUSES,
        note=lambda error: logger.warning(
            "writing %s failed, trying again: %s", what, error_text(error), extra={"event": "outcome_failed"}
        ),
    )


@dataclass(frozen=True, slots=True)
class Waiting:
    """
    What a change waits for.

    Attributes:
        cause: in words that can be shown.
        doubts_max: how often in a row, since its handler may have done it to itself; None for as long as it lasts.
    """

    cause: str
    doubts_max: int | None = None


class Outcomes:
    """
    What becomes of a run that was claimed.

    Args:
        wiring: where the state comes from.
        handler: the subscription's handler.
        run: as it arrived; its changes are given to each outcome.
        claim: under which everything is written.
        beat: the claim's heartbeat.
        patience: seconds for which MongoDB may keep an outcome waiting before the execution ends without it.

    Attributes:
        owed: whether an outcome is written later: until then the claim is kept alive.
    """

    def __init__(
        self,
        wiring: Wiring,
        handler: Handler,
        run: Run,
        claim: Claim,
        beat: Heartbeat,
        *,
        patience: float,
    ) -> None:
        self.owed = False
        self._wiring = wiring
        self._handler = handler
        self._run = run
        self._claim = claim
        self._beat = beat
        self._patience = patience
        self._claims = wiring.store.claims
        self._beats = wiring.of_process(WorkerRuntime).heartbeats
        self._is_stored = run.reference is not None

    def wait(self, waiting: Waiting, what: str, error: BaseException) -> NoReturn:
        """
        Park the head until what it waits for may be there, and count nothing; always raises.

        Args:
            waiting: for what.
            what: names the head in the log.
            error: what was met.
        """
        claim = self._claim
        delay, cause, doubtful = WAITS.nth(claim.waits), waiting.cause, waiting.doubts_max is not None

        def wait(said: str) -> bool:
            return self._claims.wait(claim, delay=delay, cause=said, doubtful=doubtful)

        logger.warning(
            "%s waits, next try in %.1f s: %s",
            what,
            delay,
            cause,
            extra={"event": "change_waiting", "partition": claim.partition_id},
        )
        self._settle({"waiting": lambda: wait(storable(cause)), "waiting without cause": lambda: wait("not storable")})
        raise Ignore from error

    def park(self, retry: Retry, raw: bytes, not_before: datetime | None, delay: float | None) -> NoReturn:
        """Park the head until its retry time, and count the attempt; always raises."""

        def park() -> bool:
            given = isinstance(retry.exc, BaseException)
            error = error_text(retry.exc) if given else storable(str(retry.message or "retry"))
            return self._claims.park(self._claim, delay=delay, not_before=not_before, error=error)

        self._settle({"retry": park, "halt": self._plain_halt(raw, "its retry")})
        raise retry

    def fail(self, error: Exception, raw: bytes) -> NoReturn:
        """Apply the failure policy to the first change under this execution's fence; always raises."""
        policy, token = self._handler.policy(self._wiring.options), self._run.token_of(raw)
        if self._run.refusal is not None and self._run.refusal.halts:
            policy = "halt"
        elif is_unread(token_data(token)) and policy in ("halt", "park_key"):
            policy = "dead_letter"  # no retry can read it, and its key is not known
        claim, claims, text, ways = self._claim, self._claims, error_text(error), dict[str, Callable[[], bool]]()
        if policy == "park_key" and (objection := self._unparkable(text)):
            policy, text = "halt", objection
        if policy == "discard":
            ways["discard"] = lambda: claims.discard(claim, token)
        elif policy in _KEEPING:
            for number, form in enumerate(forms_of(raw)):
                ways[policy if number == 0 else f"{policy}, form {number + 1}"] = partial(
                    self._set_aside, token, raw, form, error, _KEEPING[policy]
                )
        ways["halt"] = lambda: self._halt(raw, token, describe(raw), text)
        ways["halt without text"] = self._plain_halt(raw, f"its failure ({type(error).__name__})")
        applied = self._settle(ways).split(",")[0]
        logger.error(
            "%s failed for good, policy %s: %s",
            describe(raw),
            applied,
            text,
            extra={"event": "change_failed", "policy": applied.split()[0], "partition": claim.partition_id},
        )
        raise error

    def _unparkable(self, error: str) -> str | None:
        """Why no key can be parked by this change; None where it can."""
        if len(self._claim.parked) >= PARKED_MAX:
            name, line = self._run.subscription, self._wiring.line
            look, retry = line.changes("dead-letters", "list", name), line.changes("retry", name)
            return _FULL.format(count=len(self._claim.parked), look=look, retry=retry, error=error)
        return None

    def wait_behind(self, raw: bytes) -> NoReturn:
        """Set the first change aside, unstarted, behind those of its key, which is parked; always raises."""
        token = self._run.token_of(raw)
        ways: dict[str, Callable[[], bool]] = {
            f"behind, form {number + 1}": partial(self._behind, token, raw, form)
            for number, form in enumerate(forms_of(raw))
        }
        ways["halt"] = lambda: self._halt(raw, token, describe(raw), _BEHIND)
        ways["halt without text"] = self._plain_halt(raw, "what it waits for")
        applied = self._settle(ways).split(",")[0]
        logger.info(
            "%s waits for its key, which is parked (%s)",
            describe(raw),
            applied,
            extra={"event": "change_behind", "partition": self._claim.partition_id},
        )
        raise Ignore

    def _behind(self, token: Mapping[str, Any], raw: bytes, form: Callable[[], KeptChange]) -> bool:
        """False also where the key was released meanwhile: then the change is sent again, and runs."""
        if self._set_aside(token, raw, form, None, PARKED_BEHIND):
            return True
        self._claims.relinquish(self._claim.partition_id, self._claim.owner)
        return False

    def handled(self, last: int, raw: bytes) -> None:
        """Everything up to this change is done."""
        token = self._run.token_of(raw)
        self._settle({"handled": lambda: self._claims.handle(self._claim, last, token)})

    def end(self) -> None:
        """Renew the claim no more, unless something is still to be written under it."""
        if not self.owed:
            self._beats.end(self._beat)

    def crashed(self, error: BaseException, *, is_counted: bool) -> None:
        """
        The process is about to end under the first change (a hard time limit, a shutdown): best effort, once.

        What is not counted, in no shutdown, is counted as a doubt.
        """
        claim = self._claim
        try:
            if is_counted:
                self._claims.crash(claim, error_text(error))
            elif is_leaving():
                self._claims.relinquish(claim.partition_id, claim.owner)
            else:
                self._claims.wait(claim, delay=WAITS.nth(claim.waits), cause=SIGNALLED, doubtful=True)
        except PyMongoError:
            logger.warning(
                "could not record the crash of %s; its claim will lapse",
                claim.partition_id,
                extra={"event": "crash_not_recorded"},
            )

    def _plain_halt(self, raw: bytes, what: str) -> Callable[[], bool]:
        """The last resort of an outcome that cannot be stored: nothing of it but words of ours."""
        token = {"_data": token_data(self._run.token_of(raw))}
        text = f"{what} cannot be stored; the worker's log says why.".encode("ascii", "replace").decode()
        return lambda: self._halt(raw, token, "?", text)

    def _halt(self, raw: bytes, token: Mapping[str, Any], key: str, text: str) -> bool:
        """What halts may outlast the oplog: it is stored before, so that a command has its bytes."""
        self._store(raw)
        return self._claims.halt(self._claim, token, key, text)

    def _store(self, raw: bytes) -> None:
        """Best effort: where it fails, the listener may store the change later, for it has read it too."""
        run = self._run
        if self._is_stored or run.refusal is not None:  # the listener has stored what it refuses
            return
        change = StoredChange(token_data(run.token_of(raw)), raw, run.hash)
        try:
            with pymongo.timeout(min(self._patience, _STORING_SECONDS)):
                self._wiring.store.spill.insert(run.partition_id, [change], run.version)
        except Exception as error:  # noqa: BLE001 - whatever it is, the halt must be written
            logger.warning(
                "%s halts without being stored before: %s",
                describe(raw),
                error_text(error),
                extra={"event": "halted_change_not_stored", "partition": run.partition_id},
            )
            return
        self._is_stored = True

    def _set_aside(
        self, token: Mapping[str, Any], raw: bytes, form: Callable[[], KeptChange], error: Exception | None, cause: str
    ) -> bool:
        """Without an error the change was not tried."""
        claim, run, found = self._claim, self._run, form()
        letter = dead_letter(
            bridge=run.bridge,
            subscription=run.subscription,
            token=token,
            key=describe(raw),
            kept=found,
            error=error_text(error) if error is not None else _BEHIND,
            traceback=traceback_text(error) if error is not None else "",
            attempts=attempts_in(claim, error) if error is not None else 0,
            place=Place(run.generation, run.index, claim.first, claim.fence, run.hash),
            cause=cause,
            name=letter_name(token_data(token), raw),
            passed_over=claim.passed_over,
        )
        self._ensure_indexes()
        return self._claims.set_aside(claim, token, letter, parks=cause == PARKED)

    def _ensure_indexes(self) -> None:
        """Create the indexes of the dead letters, once a process, best effort: letters are found without them, too."""
        runtime = self._wiring.of_process(WorkerRuntime)
        if runtime.has_indexed:
            return
        runtime.has_indexed = True
        try:
            self._wiring.store.dead_letters.ensure_indexes()
        except PyMongoError as error:
            logger.warning(
                "the collection dead_letters gets no indexes: replays of parked keys, and lists by time or key, read "
                "all of it. Grant createIndex on it to workers: %s",
                error_text(error),
                extra={"event": "index_missing"},
            )

    def _settle(self, ways: Mapping[str, Callable[[], bool]]) -> str:
        """
        Write an outcome, by the first of some ways that can be stored; which one it was.

        Raises:
            Ignore: a newer execution decides; or MongoDB does not answer, and the process writes it later.
            Exception: no way can be stored. The claim lapses, and that is counted.
        """
        claim = self._claim
        *_, last = ways
        for outcome, write in ways.items():
            try:
                accepted = persisted(write, f"an outcome of {claim.partition_id}", self._patience)
            except Exception as error:
                if isinstance(error, SoftTimeLimitExceeded) or is_transient(error):
                    self._defer(outcome, write, error)
                logger.error(
                    "%s of %s cannot be stored: %s",
                    outcome,
                    claim.partition_id,
                    error_text(error),
                    extra={"event": "outcome_not_storable", "outcome": outcome},
                )
                if outcome == last:
                    raise
                continue
            if not accepted:
                self._refused(outcome)
            break
        return outcome

    def _defer(self, outcome: str, write: Callable[[], bool], error: Exception) -> NoReturn:
        claim, beat, beats = self._claim, self._beat, self._beats
        logger.warning(
            "MongoDB does not answer: %s of %s is written as soon as it does (%s)",
            outcome,
            claim.partition_id,
            error_text(error),
            extra={"event": "outcome_deferred", "outcome": outcome},
        )
        self.owed = True

        def write_late() -> bool:
            accepted = write()
            if not accepted and not beat.charged:  # whoever has claimed meanwhile may have charged this execution
                beats.withdraw(claim)
            return accepted

        self._wiring.of_process(DeferredWrites).add(
            f"{outcome} of {claim.partition_id}", write_late, ended=lambda: beats.end(beat)
        )
        raise Ignore from error

    def _refused(self, outcome: str) -> NoReturn:
        logger.warning(
            "%s of %s (fence %d) was refused: a newer execution decides",
            outcome,
            self._claim.partition_id,
            self._claim.fence,
            extra={"event": "outcome_refused", "outcome": outcome},
        )
        raise Ignore


def attempts_in(claim: Claim, error: BaseException) -> int:
    """How often a handler was tried: what has crashed too often is not started once more, what is refused never was."""
    return claim.retries + claim.crashes + (not isinstance(error, HandlerCrashedError | RefusedChangeError))
