"""
One execution of a run in a worker: claim, handlers, outcome.

::

    envelope -> claim -> handler, change by change -> handled -> (Celery publishes the commit link)
                  |              |
                  |              +- Retry: parked        +- failure: the failure policy, under this fence
                  +- no match: dropped                   +- process ends: a crash is counted

Every way out writes at most one outcome, guarded by this execution's fence; an outcome that is refused
ends the execution quietly, because a newer one decides.

A run means what one chain per change would mean: a change at a later position that fails ends the run
before itself, so that a failing change always fails, retries and times out as the head of its own run.

Nothing here waits for a turn. What may not run now is dropped; the listener dispatches it when it is due.
"""

from __future__ import annotations

import contextvars
import logging
import secrets
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import bson
from bson.errors import BSONError
from bson.raw_bson import RawBSONDocument
from celery.exceptions import Ignore, Reject, Retry
from celery.utils.time import maybe_make_aware
from pymongo.errors import PyMongoError

from mongo_celery.bridge.change import Change, decoded, describe, token_data
from mongo_celery.bridge.fenced import FencedCollection
from mongo_celery.bridge.fenced.fence import Fence
from mongo_celery.bridge.state.claims import Claim
from mongo_celery.bridge.state.dead_letters import dead_letter
from mongo_celery.bridge.stream.source import strip_flags
from mongo_celery.bridge.worker.departure import is_leaving
from mongo_celery.bridge.worker.envelope import Run
from mongo_celery.bridge.worker.runtime import WorkerRuntime
from mongo_celery.errors import HandlerCrashedError, HandlerUsageError, StaleFencingTokenError
from mongo_celery.mongo.redaction import short
from mongo_celery.mongo.repeating import Pauses, until_answered
from mongo_celery.mongo.verdicts import explained, is_transient

if TYPE_CHECKING:
    from pymongo.client_session import ClientSession

    from mongo_celery.bridge.handlers import Handler
    from mongo_celery.bridge.wiring import Wiring

logger = logging.getLogger("mongo_celery.worker")

_ANSWER_SECONDS = 30.0
_PAUSES = Pauses(first=0.05, longest=1.0)
_ERROR_CHARS = 2000
_DEAD_LETTER_BYTES = 15 << 20

current: contextvars.ContextVar[Execution | None] = contextvars.ContextVar("mongo_celery_execution", default=None)
"""The execution whose handler runs in this context."""


def persisted(write: Callable[[], bool], what: str) -> bool:
    """
    Write to the state, for a bounded time again and again while there is no answer; whether it was accepted.

    Raises:
        PyMongoError: what the last attempt said, or what repeating cannot cure.
    """
    return until_answered(
        write,
        deadline=time.monotonic() + _ANSWER_SECONDS,
        pauses=_PAUSES,
        note=lambda error: logger.warning(
            "writing %s failed, trying again: %s", what, error, extra={"event": "outcome_failed"}
        ),
    )


class SupersededError(Ignore):
    """A newer execution decides: nothing more is to be done with this message."""


class Execution:
    """
    One delivery of a run to a worker.

    Args:
        wiring: where state and clients come from.
        handler: the subscription's handler.
        run: the verified envelope.
    """

    def __init__(self, wiring: Wiring, handler: Handler, run: Run) -> None:
        self._wiring = wiring
        self._handler = handler
        self._run = run
        self._store = wiring.store
        self._codec = wiring.client.codec_options
        self.claim: Claim | None = None
        self._handled_in_transaction = False

    def execute(self, call: Callable[[Change, int], None]) -> None:
        """
        Claim the run and call the handler for each change.

        Args:
            call: runs the handler with a change and the number of earlier attempts.

        Raises:
            Ignore: nothing more is to be done with this message.
            Retry: the first change is parked.
            Exception: the first change failed for good, and the failure policy has been applied.
        """
        started = time.monotonic()
        claim = self.claim = self._take_claim(started)
        if claim.crashes > self._wiring.options.max_crashes:
            self._fail(claim, self._crashed(claim), self._run.changes[0])
        beats = self._wiring.of_process(WorkerRuntime).heartbeats
        beat = beats.begin(claim, started, renew=not self._handler.transactional)
        token = current.set(self)
        try:
            self._run_changes(claim, call, lambda: beat.lost)
        finally:
            current.reset(token)
            beats.end(beat)

    def handle_in(self, session: ClientSession, change: Change) -> None:
        """The last write of a transactional handler's transaction; SupersededError when a newer execution decides."""
        assert self.claim is not None, "a handler runs under a claim"
        if not self._store.claims.handle(self.claim, change.seq, change.resume_token, session):
            raise SupersededError

    def transaction_committed(self) -> None:
        """The mark is there. Not known before: a body may run again and then end otherwise."""
        self._handled_in_transaction = True

    def _take_claim(self, started: float) -> Claim:
        """The claim, after one more attempt where the first got no answer."""
        try:
            return self._try_claim(started)
        except PyMongoError as error:
            if not is_transient(error):
                raise Ignore from error
        try:
            return self._try_claim(started)
        except PyMongoError as error:
            raise Ignore from error

    def _try_claim(self, started: float) -> Claim:
        run, owner = self._run, secrets.token_hex(8)
        options = self._wiring.options
        ttl = options.claim_ttl + (options.transaction_seconds if self._handler.transactional else 0)
        try:
            claim = self._store.claims.take(
                run.partition_id,
                owner=owner,
                version=run.version,
                first=run.first,
                last=run.last,
                token=token_data(_token_of(run.changes[0])),
                ttl=ttl,
            )
        except PyMongoError as error:
            said = explained(error, self._wiring.state_concern) or short(error)
            logger.warning("claim of %s failed: %s", run.partition_id, said, extra={"event": "claim_failed"})
            self._relinquish(owner)
            raise
        if claim is None:
            logger.debug("dropped a message for %s: duplicate, stale or early", run.partition_id)
            raise Ignore
        if time.monotonic() - started > ttl / 2:
            logger.warning("claim of %s came too late", run.partition_id, extra={"event": "claim_late"})
            self._relinquish(owner)
            raise Ignore
        return claim

    def _relinquish(self, owner: str) -> None:
        try:
            self._store.claims.relinquish(self._run.partition_id, owner)
        except PyMongoError:
            logger.warning(
                "could not end the claim of %s yet; tried again while this process lives, else it lapses",
                self._run.partition_id,
                extra={"event": "claim_not_ended"},
            )
            self._wiring.of_process(WorkerRuntime).heartbeats.settle(self._run.partition_id, owner)

    def _run_changes(
        self,
        claim: Claim,
        call: Callable[[Change, int], None],
        is_lost: Callable[[], bool],
    ) -> None:
        done: Change | None = None
        until = time.monotonic() + self._wiring.options.run_seconds
        for offset, raw in enumerate(self._run.changes):
            # Sent before the listener could know of a crash: its changes run one by one from now on.
            if offset and (claim.crashes or is_lost() or time.monotonic() > until):
                break
            outcome = self._run_one(claim, raw, offset, done, call)
            if outcome is None:
                break
            done = outcome
        if done is not None and not self._handled_in_transaction:
            self._record_handled(claim, done)

    def _run_one(
        self,
        claim: Claim,
        raw: bytes,
        offset: int,
        done: Change | None,
        call: Callable[[Change, int], None],
    ) -> Change | None:
        """The change when it is done; None when a later change of the run must become the head of its own."""
        try:
            change = self._change(claim, raw, offset)
            call(change, claim.retries if offset == 0 else 0)
            return change
        except SupersededError:
            raise
        except Ignore:
            logger.info("handler ignored %s", self._describe(raw), extra={"event": "change_ignored"})
            return change
        except Exception as error:  # noqa: BLE001 - whatever a handler raises becomes an outcome
            if offset == 0:
                self._first_failed(claim, raw, error)
            logger.info(
                "%s will be the head of its own run: %r", self._describe(raw), error, extra={"event": "run_cut"}
            )
            return None
        except BaseException as error:
            self._record_crash(claim, done, error)
            raise

    def _first_failed(self, claim: Claim, raw: bytes, error: Exception) -> None:
        """Write the outcome of a failed head; always raises."""
        if isinstance(error, Retry):
            self._park(claim, error)
        if isinstance(error, StaleFencingTokenError) and not self._persist(
            lambda: self._store.claims.is_mine(claim),
        ):
            raise Ignore from error
        if isinstance(error, Reject) and error.args and isinstance(error.args[0], Exception):
            error = error.args[0]
        self._fail(claim, error, raw)

    def _park(self, claim: Claim, retry: Retry) -> None:
        when: Any = retry.when
        not_before = maybe_make_aware(when) if isinstance(when, datetime) else None
        delay = None if not_before is not None else max(float(when or 0), 0.0)
        error = _text(retry.exc) if isinstance(retry.exc, BaseException) else _storable(str(retry.message or "retry"))
        accepted = self._persist(
            lambda: self._store.claims.park(claim, delay=delay, not_before=not_before, error=error),
        )
        if not accepted:
            self._refused(claim, "retry")
        raise retry

    def _fail(self, claim: Claim, error: Exception, raw: bytes) -> None:
        """Apply the failure policy to the first change under this execution's fence; always raises."""
        policy, token = self._handler.policy(self._wiring.options), _token_of(raw)
        if policy == "halt":
            accepted = self._persist(lambda: self._store.claims.halt(claim, token, self._describe(raw), _text(error)))
        elif policy == "skip":
            accepted = self._persist(lambda: self._store.claims.skip(claim, token))
        else:
            document = self._dead_letter(claim, token, raw, error)
            accepted = self._persist(lambda: self._store.claims.set_aside(claim, token, document))
        if not accepted:
            self._refused(claim, policy)
        logger.error(
            "%s failed for good, policy %s: %s",
            self._describe(raw),
            policy,
            _text(error),
            extra={"event": "change_failed", "policy": policy, "partition": claim.partition_id},
        )
        raise error

    def _dead_letter(self, claim: Claim, token: Mapping[str, Any], raw: bytes, error: Exception) -> dict[str, Any]:
        if len(raw) > _DEAD_LETTER_BYTES:  # it must fit into a document: keep what names the change
            event = bson.decode(raw)
            kept = ("_id", "operationType", "clusterTime", "ns", "documentKey")
            raw = bson.encode({name: event[name] for name in kept if name in event})
        return dead_letter(
            bridge=self._run.bridge,
            subscription=self._run.subscription,
            partition=self._run.index,
            token=token,
            key=self._describe(raw),
            change=raw,
            error=_text(error),
            traceback=_storable("".join(traceback.format_exception(error))[-_ERROR_CHARS * 4 :]),
            # What has crashed too often is not started once more.
            attempts=claim.retries + claim.crashes + (not isinstance(error, HandlerCrashedError)),
        )

    def _record_handled(self, claim: Claim, done: Change) -> None:
        token, after_transaction = dict(done.resume_token), self._handler.transactional
        if not self._persist(
            lambda: self._store.claims.handle(claim, done.seq, token, retryable=after_transaction),
        ):
            self._refused(claim, "handled")

    def _record_crash(self, claim: Claim, done: Change | None, error: BaseException) -> None:
        """The process is about to end (a hard time limit, a shutdown): best effort, once."""
        try:
            if done is not None:
                self._store.claims.handle(claim, done.seq, dict(done.resume_token))
            elif is_leaving():  # a shutdown that was announced is nobody's crash
                self._store.claims.relinquish(claim.partition_id, claim.owner)
            else:
                self._store.claims.crash(claim, _text(error))
        except PyMongoError:
            logger.warning(
                "could not record the crash of %s; its claim will lapse",
                claim.partition_id,
                extra={"event": "crash_not_recorded"},
            )

    def _refused(self, claim: Claim, outcome: str) -> None:
        logger.warning(
            "%s of %s (fence %d) was refused: a newer execution decides",
            outcome,
            claim.partition_id,
            claim.fence,
            extra={"event": "outcome_refused", "outcome": outcome},
        )
        raise Ignore

    def _persist(self, write: Callable[[], bool]) -> bool:
        return persisted(write, f"an outcome of {self._run.partition_id}")

    def _change(self, claim: Claim, raw: bytes, offset: int) -> Change:
        event = strip_flags(bson.decode(raw, self._codec))
        return Change(
            event,
            partition=self._run.index,
            seq=claim.first + offset,
            fencing_token=claim.fence,
            _fencer=self._fenced,
        )

    def _fenced(self, change: Change, collection: Any) -> FencedCollection:
        if isinstance(collection, str):
            collection = self._wiring.collection(collection)
        key = f"{self._run.bridge}/{self._run.subscription}"
        fence = Fence(key, self._run.generation, self._run.index, change.fencing_token)
        return FencedCollection(collection, fence)

    def _crashed(self, claim: Claim) -> HandlerCrashedError:
        message = (
            f"The worker ended {claim.crashes} times while handling {self._describe(self._run.changes[0])}: look for a "
            "signal, the out-of-memory killer or a hard time limit in its log."
        )
        return HandlerCrashedError(message, crashes=claim.crashes)

    def _describe(self, raw: bytes) -> str:
        try:
            return describe(decoded(raw))
        except BSONError:
            return f"an undecodable event of {self._run.partition_id}"


def _token_of(raw: bytes) -> Mapping[str, Any]:
    return dict(RawBSONDocument(raw)["_id"])  # the rest of the event may be large


def _text(error: BaseException | None) -> str:
    return _storable(f"{type(error).__name__}: {error}"[:_ERROR_CHARS])


def _storable(text: str) -> str:
    """Without lone surrogates, as file names have them: BSON refuses those, and the outcome would be lost."""
    return text.encode("utf-8", "replace").decode()


@dataclass(frozen=True, slots=True)
class ParkedSignature:
    """
    Stands in for the signature that `Task.retry` would publish.

    A retry is parked in MongoDB, not in the broker, so its `apply_async` publishes nothing.
    """

    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()

    def apply_async(self, *_args: Any, **_options: Any) -> None:
        """Publish nothing."""


def refuse_new_arguments(args: Any, kwargs: Any) -> None:
    """A retry repeats the change itself; it cannot be given other arguments."""
    if args is not None or kwargs:
        raise HandlerUsageError("A handler's retry() repeats its change; it takes no args or kwargs.")
