"""
One execution of a run in a worker: claim, handlers, outcome.

::

    envelope -> claim -> handler, change by change -> handled -> (Celery publishes the commit link)
                  |  |           |
                  |  |           +- Retry: parked        +- failure: the failure policy, under this fence
                  |  +- its key is parked: set aside behind it
                  +- no match: dropped                   +- infrastructure was away: parked, not counted
                                                         +- process ends: a crash is counted

Every way out writes at most one outcome (`outcomes`), guarded by this execution's fence.

A run means what one chain per change would mean. What is done of one that takes long is recorded now and then, so that
a crash repeats what was done since; and before a change that fails, so that this one is the claim's first, and fails,
retries and is charged as such. Time limits are those of a change (`limits`).

Nothing here waits for a turn. What may not run now is dropped; the listener dispatches it when it is due.
"""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

import bson
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded
from pymongo.errors import PyMongoError

from mongo_celery.bridge.change import Change, describe
from mongo_celery.bridge.error_text import error_text
from mongo_celery.bridge.fenced.fence import Fence, Origin
from mongo_celery.bridge.partitioning import origin_of
from mongo_celery.bridge.state.claims import Claim, new_owner
from mongo_celery.bridge.state.spill import StoredChange
from mongo_celery.bridge.stream.source import strip_flags
from mongo_celery.bridge.worker.attribution import (
    cause_text,
    conflict_cause,
    has_reached_limit,
    infrastructure_cause,
    is_autoretried,
    names,
)
from mongo_celery.bridge.worker.deferred import DeferredWrites
from mongo_celery.bridge.worker.departure import is_leaving, is_sent_away
from mongo_celery.bridge.worker.envelope import Reference, Run
from mongo_celery.bridge.worker.outcomes import ANSWER_SECONDS, Outcomes, Waiting, persisted
from mongo_celery.bridge.worker.retry_times import retry_time
from mongo_celery.bridge.worker.run_outcomes import RunOutcomes
from mongo_celery.bridge.worker.runtime import WorkerRuntime
from mongo_celery.errors import (
    HandlerCrashedError,
    HandlerUsageError,
    OutdatedChangeError,
    RefusedChangeError,
    StaleFencingTokenError,
)
from mongo_celery.mongo.opening import renew_connections, start_session
from mongo_celery.mongo.verdicts import brief, explained, is_transient
from mongo_celery.outbox.once import RunningElsewhereError

if TYPE_CHECKING:
    from bson.binary import Binary
    from pymongo.client_session import ClientSession

    from mongo_celery.bridge.handlers import Handler
    from mongo_celery.bridge.wiring import Wiring

logger = logging.getLogger("mongo_celery.worker")

_TIME_OUTS_MAX = 3
_DOUBTS_MAX = 10  # some minutes: a dead client's transaction holds its documents for one by default
_TOO_LONG = "the transaction took longer than its limit; a write without session= waits for what it has locked itself"
_TOKEN_CHARS = 64
_PROGRESS_SECONDS = 0.2
"""What a crash repeats of a run at most, in time of its handler."""

_MISSING = (
    "%s: nothing is charged, and they are stored again before the change is sent again. Stop whatever else removes "
    "documents of the collection `backlog`"
)
_LOST_CLAIM_ANSWERS = 5  # a claim whose answer was lost may still arrive: the server reads what is in its sockets

current: contextvars.ContextVar[Execution | None] = contextvars.ContextVar("mongo_celery_execution", default=None)
"""The execution whose handler runs in this context."""


class SupersededError(Ignore):
    """A newer execution decides: nothing more is to be done with this message."""


class Execution:
    """
    One delivery of a run to a worker.

    Args:
        wiring: where state and clients come from.
        handler: the subscription's handler.
        run: the verified envelope.
        patience: seconds for which MongoDB may keep an outcome waiting before the execution ends without it.
        run_seconds: after which no further change of the run is begun; those of the bridge by default.
        is_limited: whether the message has an end of its own, by limits of time or rate, made of these seconds.
        since: monotonic time at which its task was called; now by default.

    Attributes:
        begun: whether `before_start` has run under its claim.
        handler: whose function is called.
        told: the place, in the list that a bulk handler was given, of the change that it says has failed.
    """

    _outcomes: type[Outcomes] = RunOutcomes
    _written: RunOutcomes
    begun = False
    told: int | None = None
    _is_first = True
    """Whether what is handled now is the claim's first change, of which it says what is counted."""

    def __init__(
        self,
        wiring: Wiring,
        handler: Handler,
        run: Run,
        patience: float = ANSWER_SECONDS,
        run_seconds: float | None = None,
        *,
        is_limited: bool = True,
        since: float | None = None,
    ) -> None:
        self._wiring = wiring
        self.handler = handler
        self._run = run
        self._patience = patience
        options = wiring.options
        self._is_limited = is_limited
        self._since = time.monotonic() if since is None else since
        self._until = time.monotonic() + (options.run_seconds if run_seconds is None else run_seconds)
        self._ttl = options.claim_ttl + (options.transaction_seconds if handler.transactional else 0)
        self._store = wiring.store
        self._codec = wiring.client.codec_options
        self._view = wiring.view_of(handler)
        self.claim: Claim | None = None
        self.session: ClientSession | None = None
        self._handled_in_transaction = False
        self._decided: BaseException | None = None
        self._timed_out: BaseException | None = None
        self._met_outage: str | None = None
        self._met_conflict: str | None = None
        self._judged: tuple[BaseException, Waiting | None] | None = None

    def execute(self, call: Callable[[Any, int], None]) -> None:
        """
        Claim the run and call the handler for each change.

        Args:
            call: runs the handler with a change, or what `ListExecution` gives, and the number of earlier attempts.

        Raises:
            Ignore: nothing more is to be done with this message.
            Retry: the first change is parked.
            Exception: the first change failed for good, and the failure policy has been applied.
        """
        if self.handler.transactional:
            self.session = start_session(self._wiring.client)
        try:
            self._execute(call)
        finally:
            if self.session is not None:
                self.session.end_session()

    def _execute(self, call: Callable[[Any, int], None]) -> None:
        started = time.monotonic()
        claim = self.claim = self._take_claim(started)
        beats = self._wiring.of_process(WorkerRuntime).heartbeats
        beat = beats.begin(claim, started, ttl=self._ttl, renew=not self.handler.transactional)
        outcomes = self._outcomes(
            self._wiring,
            self.handler,
            self._run,
            claim,
            beat,
            patience=self._patience,
        )
        token = current.set(self)
        try:
            self._load(outcomes)
            is_broken = self._run.refusal is not None and self._run.refusal.halts  # it halts, whatever its key
            if self._is_parked(0) and not is_broken:
                outcomes.wait_behind(self._run.changes[0])
            if self._run.refusal is not None:
                outcomes.fail(RefusedChangeError(self._run.refusal.reason), self._run.changes[0])
            if claim.crashes > self._wiring.options.max_crashes:
                outcomes.fail(self._crashed(claim), self._run.changes[0])
            self._run_changes(claim, outcomes, call)
        finally:
            current.reset(token)
            outcomes.end()

    def handle_in(self, session: ClientSession, change: Change) -> None:
        """The last write of a transactional handler's transaction; SupersededError when a newer execution decides."""
        assert self.claim is not None, "a handler runs under a claim"
        token = self._run.token_of(self._bytes_of(change))
        if not self._store.claims.handle(self.claim, change.seq, token, session):
            raise SupersededError

    def session_of(self, handler: Handler) -> ClientSession | None:
        """Return the session for a transaction of this handler's; None where a handler calls another one, or itself."""
        is_free = self.session is not None and not self.session.in_transaction
        return self.session if is_free and self.handler is handler else None

    def give_session(self) -> ClientSession:
        """Return the session of the handler's transactions to a caller that ends it from now on."""
        session, self.session = self.session, None
        assert session is not None, "a transactional handler has one session"
        return session

    def transaction_committed(self) -> None:
        """The mark is there. Not known before: a body may run again and then end otherwise."""
        self._handled_in_transaction = True

    def met(self, error: BaseException) -> None:
        """What the body of the transaction has met, long before its limit."""
        self._met_outage = infrastructure_cause(error) or self._met_outage
        self._met_conflict = conflict_cause(error) or self._met_conflict

    def transaction_timed_out(self, error: BaseException) -> None:
        """This error says only that the transaction has reached its limit."""
        self._timed_out = error

    def waits_for(self, error: BaseException, named: Iterable[object]) -> bool:
        """Whether an `autoretry_for` would count what is to wait instead: it took the error without naming it."""
        return is_autoretried(error) and not names(named, error) and self._waiting_for(error) is not None

    def decided(self, error: BaseException) -> None:
        """The handler's own retries have ended with this exception: it counts, whatever it is."""
        self._decided = error

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

    def _end_lapsed_transaction(self) -> None:
        where = self._run.partition_id
        if self._store.claims.end_transactions([where]):
            logger.warning(
                "ended the transaction that a lapsed claim of %s has left open",
                where,
                extra={"event": "transaction_ended"},
            )

    def _try_claim(self, started: float) -> Claim:
        run, owner, ttl = self._run, new_owner(), self._ttl
        session = None if self.session is None else self.session.session_id["id"]
        try:
            if session is not None:  # what it has locked would hold up the handler
                self._end_lapsed_transaction()
            claim = self._take(owner, session)
        except SoftTimeLimitExceeded as error:
            self._relinquish(owner)
            raise Ignore from error
        except PyMongoError as error:
            renew_connections(self._wiring.client, error)
            said = explained(error, self._wiring.state_concern) or brief(error)
            logger.warning("claim of %s failed: %s", run.partition_id, said, extra={"event": "claim_failed"})
            if error.timeout:
                with suppress(PyMongoError, SoftTimeLimitExceeded):
                    self._end_lapsed_transaction()  # which may have locked the partition
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

    def _take(self, owner: str, session: Binary | None) -> Claim | None:
        """Take the claim, where the run may have it now."""
        run = self._run
        return self._store.claims.take(
            run.partition_id,
            owner=owner,
            version=run.version,
            first=run.first,
            last=run.last,
            token=run.head,
            ttl=self._ttl,
            session=session,
            living=self._wiring.of_process(WorkerRuntime).heartbeats.living(run.partition_id),
            inline=run.is_inline,
        )

    def _relinquish(self, owner: str) -> None:
        """End a claim that is not used: now, or as soon as MongoDB answers again; else it would count as a crash."""
        partition_id, claims = self._run.partition_id, self._store.claims
        try:
            if claims.relinquish(partition_id, owner):
                return
        except (PyMongoError, SoftTimeLimitExceeded) as error:
            logger.warning(
                "could not end the claim of %s yet: %s",
                partition_id,
                error_text(error),
                extra={"event": "claim_not_ended"},
            )
        self._wiring.of_process(DeferredWrites).add(
            f"the end of a claim of {partition_id}",
            lambda: claims.relinquish(partition_id, owner) or claims.withdraw(partition_id, owner),
            answers=_LOST_CLAIM_ANSWERS,
        )

    def _load(self, outcomes: Outcomes) -> None:
        """See to it that the changes are there."""
        if self._run.reference is not None:
            self._fetch(self._run.reference, outcomes)

    def _fetch(self, reference: Reference, outcomes: Outcomes) -> None:
        """
        Read the changes of a run that travels by reference; where they cannot be read the head waits, uncharged.

        The listener stores them before it sends the message, and stores them again when it sends it again.
        """
        run, found = self._run, dict[str, StoredChange]()
        what = f"change {run.first} of {run.partition_id}"
        try:
            found = self._store.spill.fetch(run.partition_id, reference.tokens)
        except (PyMongoError, SoftTimeLimitExceeded) as error:
            outcomes.wait(Waiting(cause_text(error)), what, error)
        except Exception as error:  # noqa: BLE001 - whatever a document does that is not what was stored
            logger.debug("%s as it is stored: %s", what, error_text(error))
        changes = tuple(found[token].raw for token in reference.tokens if token in found)
        if not reference.fits(changes):
            missing = f"the stored bytes of {what}, token {reference.tokens[0][:_TOKEN_CHARS]}, are missing"
            logger.error(_MISSING, missing, extra={"event": "stored_change_missing", "partition": run.partition_id})
            outcomes.wait(Waiting(missing), what, LookupError(missing))
        self._run = replace(run, changes=changes)

    def _run_changes(self, claim: Claim, outcomes: Outcomes, call: Callable[[Any, int], None]) -> None:
        self._begin(outcomes)
        recorded_at, done = time.monotonic(), 0
        for offset in range(len(self._run.changes)):
            # Sent before the listener could know of a crash: its changes run one by one from now on.
            if offset and (claim.crashes or self._must_end() or self._is_parked(offset)):
                break
            if offset and self._is_progress_due(recorded_at):
                self._record(offset)
                recorded_at = time.monotonic()
                if self._must_end():
                    break
            self._run_one(offset, call)
            done = offset + 1
        if not self._handled_in_transaction:
            self._end(done)

    def _begin(self, outcomes: Outcomes) -> None:
        assert isinstance(outcomes, RunOutcomes), "they are made from the class above"
        outcomes.begin(self._run)
        self._written = outcomes

    @property
    def _recorded(self) -> int:
        """How many changes of the run the position has passed by now."""
        return self._written.claim.first - self._run.first

    def _must_end(self) -> bool:
        """Whether nothing more of the run is to be begun."""
        return self._written.is_lost or time.monotonic() > self._until

    def _is_progress_due(self, since: float) -> bool:
        """Whether what is done since this monotonic time is to be recorded."""
        return time.monotonic() - since > _PROGRESS_SECONDS

    def _record(self, count: int) -> None:
        """The position passes so many changes of the run; the next one is the claim's first."""
        if count > self._recorded:
            self._written.advance(count - self._recorded)
            self.claim = self._written.claim

    def _end(self, done: int) -> None:
        """So many changes of the run are done, and no more of it is begun."""
        rest = done - self._recorded
        if not rest:
            self._written.released()
        elif self._recorded:
            self._written.passed(rest)
        else:
            self._written.handled(self._run.first + done - 1, self._run.changes[done - 1])

    def _is_parked(self, offset: int) -> bool:
        """Return True if the key of a change is parked: then the change becomes the head of a run of its own."""
        assert self.claim is not None, "a run is looked at under a claim"
        return bool(self.claim.parked) and self._run.hash_at(offset) in self.claim.parked

    def _run_one(self, offset: int, call: Callable[[Change, int], None]) -> None:
        """Give one change to the handler; it raises where the execution ends with it."""
        raw, claim = self._run.changes[offset], self._written.claim
        self._is_first = offset == self._recorded
        try:
            call(self._change(claim, raw, offset), claim.retries if self._is_first else 0)
        except SupersededError:
            raise
        except Ignore:
            logger.info("handler ignored %s", describe(raw), extra={"event": "change_ignored"})
        except Exception as error:  # noqa: BLE001 - whatever a handler raises becomes an outcome
            self._failed(offset, error)
        except BaseException as error:  # noqa: BLE001 - it is raised again where it may be
            self._crash(error, offset - self._recorded)

    def _crash(self, error: BaseException, done: int) -> NoReturn:
        """
        Write that the process ends by this error; always raises.

        A signal in no shutdown is given the benefit of the doubt for some times in a row: it may be a time limit's.
        A pool of threads lives on, and Celery acknowledges no message that ends so: its prefetch would fill.

        Args:
            error: no `Exception`.
            done: so many changes are done, and not recorded yet.
        """
        doubts = 0 if done or self.claim is None else self.claim.doubts
        is_away = is_sent_away(error, time.monotonic() - self._since)
        is_counted = not is_away or (doubts >= _DOUBTS_MAX and not is_leaving())
        self._written.crashed(error, done, is_counted=is_counted)
        if threading.current_thread() is threading.main_thread():
            raise error
        raise Ignore from error

    def _failed(self, offset: int, error: Exception) -> NoReturn:
        """Write the outcome of a change that has failed, behind those that are done; always raises."""
        self._record(offset)
        written = self._written
        self._first_failed(written.claim, written, self._run.changes[offset], error)

    def _first_failed(self, claim: Claim, outcomes: Outcomes, raw: bytes, error: Exception) -> NoReturn:
        """Write the outcome of a failed head; always raises."""
        if isinstance(error, Retry) and not isinstance(error, RunningElsewhereError):
            try:
                due = retry_time(error.when)
            except HandlerUsageError as unusable:
                error = unusable
            else:
                outcomes.park(error, raw, *due)
        if isinstance(error, StaleFencingTokenError | OutdatedChangeError):
            self._check_stale(claim)
        waiting = None if error is self._decided else self._waiting_for(error)
        if waiting is not None:
            outcomes.wait(waiting, describe(raw), error)
        if isinstance(error, Reject) and error.args and isinstance(error.args[0], Exception):
            error = error.args[0]
        outcomes.fail(error, raw)

    def _check_stale(self, claim: Claim) -> None:
        """Ignore when a newer execution decides, as a refused write says; a claim that still stands is no such case."""
        try:
            mine = persisted(lambda: self._store.claims.is_mine(claim), claim.partition_id, self._patience)
        except (PyMongoError, SoftTimeLimitExceeded) as error:
            self._relinquish(claim.owner)
            raise Ignore from error
        if not mine:
            raise Ignore

    def _waiting_for(self, error: BaseException) -> Waiting | None:
        """
        What the change has to wait for; None when the failure is the handler's own.

        What its transaction may have done to itself is given the benefit of the doubt for some times in a row.
        """
        assert self.claim is not None, "a handler runs under a claim"
        if self._judged is None or self._judged[0] is not error:
            self._judged = (error, self._judge(error))
        waiting = self._judged[1]
        doubts = self.claim.doubts if self._is_first else 0
        if waiting is not None and waiting.doubts_max is not None and doubts >= waiting.doubts_max:
            return None
        return waiting

    def _judge(self, error: BaseException) -> Waiting | None:
        if isinstance(error, RunningElsewhereError):
            return Waiting(str(error.message))
        renew_connections(self._wiring.client, error)
        outage, conflict = infrastructure_cause(error), conflict_cause(error)
        if has_reached_limit(error, self._timed_out):
            outage, conflict = self._met_outage, self._met_conflict or conflict
            if outage is None and conflict is None:
                # Slow servers, a slow body, or one that waits for what its own transaction has locked.
                said = f"{_TOO_LONG} ({cause_text(error)})"
                return Waiting(said, _TIME_OUTS_MAX if self._is_answered() else None)
        if outage is not None:
            return Waiting(outage)
        return None if conflict is None else Waiting(conflict, _DOUBTS_MAX)

    def _is_answered(self) -> bool:
        """Whether MongoDB answers, for a majority, at this moment."""
        assert self.claim is not None, "a handler runs under a claim"
        try:
            self._store.claims.is_mine(self.claim)
        except (PyMongoError, SoftTimeLimitExceeded):
            return False
        return True

    def _bytes_of(self, change: Change) -> bytes:
        """The event as it arrived."""
        return self._run.changes[change.seq - self._run.first]

    def _change(self, claim: Claim, raw: bytes, offset: int) -> Change:
        return Change.unread(
            lambda: strip_flags(bson.decode(raw, self._codec)),
            partition=self._run.index,
            seq=self._run.first + offset,
            fencing_token=claim.fence,
            _fence=self._fence_of,
            _named=self._wiring.collection,
            _view=self._view,
        )

    def _fence_of(self, change: Change) -> Fence:
        run = self._run
        return Fence(
            f"{run.bridge}/{run.subscription}", run.generation, run.index, change.fencing_token, self._origin_of(change)
        )

    def _origin_of(self, change: Change) -> Origin | None:
        """What writes of other partitions compare with; None where all changes of a document are in this one."""
        assert self.claim is not None, "a handler runs under a claim"
        if self.handler.partitioner(self._wiring.options).is_by_document:
            return None
        raw = self._bytes_of(change)
        return origin_of(raw, self._run.token_of(raw), self.claim.rewound)

    def _crashed(self, claim: Claim) -> HandlerCrashedError:
        message = (
            f"The worker ended {claim.crashes} times while handling {describe(self._run.changes[0])}: look for a "
            "signal, the out-of-memory killer or a hard time limit in its log."
        )
        return HandlerCrashedError(message, crashes=claim.crashes)


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
