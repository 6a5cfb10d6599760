"""
One execution in a worker: claim, handler, outcome. One loop serves runs, lists, coalesced runs and replays.

::

    envelope -> claim -> load -> handler, part by part -> outcome -> (Celery publishes the commit link)
                  |       |          |        |
                  |       |          |        +- progress: the position advances, and the claim continues after it
                  |       |          +- failure: the failed change becomes the claim's first, then it is decided
                  |       +- its key is parked, it was refused, or it crashed too often: decided without the handler
                  +- no match: dropped

The subject chooses the changes to give, and writes what happens to them (`subject`). An outcome is a value (`outcome`):
the loop returns a decision, and only `_settle` writes it.

A run has the same effect as one chain for each change. A long run records its progress now and then, so a crash repeats
only the work since then. It also records progress before a failed change: this change is then the claim's first, and
its failure, retries and counts are its own. If a list fails, no change is counted until it is alone or the handler
names it (`Changes.failed_at`). An outage is never counted. Time limits apply to each change (`limits`).

Nothing here waits its turn. A message that may not run now is dropped. The listener dispatches it when it is due.
"""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from bson.errors import BSONError
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded
from pymongo import AsyncMongoClient, MongoClient
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.errors import PyMongoError

from mongo_celery.bridge.change import Changes, token_data
from mongo_celery.bridge.event_loop import EVENT_LOOP
from mongo_celery.bridge.state.claims import Claim, Claims, name_place, new_owner
from mongo_celery.bridge.worker.attribution import (
    Attempt,
    WaitReason,
    cause_text,
    conflict_cause,
    has_reached_limit,
    infrastructure_cause,
    is_autoretried,
    names,
)
from mongo_celery.bridge.worker.deferred import DeferredWrites
from mongo_celery.bridge.worker.lifetime import describe_end, is_leaving, is_raised_by_shutdown, is_sent_away
from mongo_celery.bridge.worker.outcome import Decision, Outcome, SupersededError, retry_time
from mongo_celery.bridge.worker.parts import Parts, read_document_key
from mongo_celery.bridge.worker.replay_subject import ReplaySubject
from mongo_celery.bridge.worker.subject import WAITS, RunSubject, Subject
from mongo_celery.errors import HandlerCrashedError, HandlerUsageError, OutdatedChangeError, StaleFencingTokenError
from mongo_celery.mongo.opening import STRICT, renew_connections
from mongo_celery.mongo.repeating import Pauses, retry_until_answered
from mongo_celery.mongo.steps import Session, Steps
from mongo_celery.mongo.verdicts import brief, error_text, explain_error, is_logged_out, is_refused_user, is_transient
from mongo_celery.outbox.once import RunningElsewhereError

if TYPE_CHECKING:
    from mongo_celery.bridge.handlers import Handler
    from mongo_celery.bridge.wiring import Wiring
    from mongo_celery.bridge.worker.envelope import Run
    from mongo_celery.bridge.worker.heartbeat import Heartbeat

logger = logging.getLogger("mongo_celery.worker")

_PAUSES = Pauses(first=0.05, longest=1.0)
_TIME_OUTS_MAX = 3
_NAMED_MAX = 20
_DOUBTS_MAX = 10  # some minutes: by default a dead client's transaction locks its documents for one minute
_TOO_LONG = "the transaction took longer than its limit. A write without session= waits for the transaction's own locks"
_SIGNALLED = "a signal ended the worker's process, although the worker was not shutting down"
_PROGRESS_SECONDS = 0.2
"""The most handler time of a run that a crash repeats, in seconds."""

_LOST_CLAIM_ANSWERS = 5  # a claim with a lost answer may still arrive: the server reads its sockets later

Call = Callable[[Any, int], None]
"""Runs the handler with a change or a list of changes, and with the number of earlier attempts."""

current: contextvars.ContextVar[Execution | None] = contextvars.ContextVar("mongo_celery_execution", default=None)
"""The execution whose handler runs in this context."""


class Execution:
    """
    One delivery of a run, or of a dead letter's replay, to a worker.

    Args:
        wiring: gives state and clients.
        handler: the subscription's handler.
        run: the verified envelope.
        patience: seconds for which the execution waits for MongoDB to store an outcome, then it ends without one.
        run_seconds: after these seconds no further change of the run begins. By default the bridge's.
        is_limited: True if a time or rate limit of the message determines these seconds.
        since: monotonic time at which its task was called. Now by default.

    Attributes:
        handler: the handler to call.
        subject: the changes to give.
        claim: the current claim. Its first change is the first one that is not recorded.
        attempt: the current call of the handler.
        session: the session of the handler's transactions. None if there is none, or if its last commit got no answer.
        begun: True if `before_start` has run under its claim.
        request: the worker's request for its message.
    """

    claim: Claim
    _beat: Heartbeat
    _parts: Parts
    _halfway: float

    def __init__(
        self,
        wiring: Wiring,
        handler: Handler,
        run: Run,
        patience: float,
        run_seconds: float | None = None,
        *,
        is_limited: bool = True,
        since: float | None = None,
    ) -> None:
        now = time.monotonic()
        kind = RunSubject if run.dead_letter is None else ReplaySubject
        self.handler = handler
        self.subject: Subject = kind(wiring, handler, run, patience)
        runtime = self.subject.runtime
        options = runtime.options
        self.attempt = Attempt()
        self.session: Session | None = None
        self.begun = False
        self.request: Any = None
        self._wiring = wiring
        self._options = options
        self._claims = runtime.store.claims
        self._beats = runtime.heartbeats
        self._patience = patience
        self._is_limited = is_limited
        self._since = now if since is None else since
        self._until = now + (options.run_seconds if run_seconds is None else run_seconds)
        self._ttl = options.claim_ttl + (options.transaction_seconds if handler.transactional else 0)
        self._first = 0
        self._calls = 0
        self._failure: Attempt | None = None
        self._is_owed = False

    def execute(self, call: Call) -> None:
        """
        Claim the run, call the handler for each change, and write the outcome.

        Raises:
            Ignore: this message needs no further work.
            Retry: the first change is retried later.
            Exception: the first change failed permanently, and the failure policy was applied.
        """
        if self.handler.is_async:
            EVENT_LOOP.get()  # if its thread cannot start, that is not the handler's failure
        if self.handler.transactional:
            self.session = self._client.start_session(default_transaction_options=STRICT)
        try:
            self._execute(call)
        finally:
            if isinstance(self.session, AsyncClientSession):
                EVENT_LOOP.get().begin(self.session.end_session)
            elif self.session is not None:
                self.session.end_session()

    @property
    def _client(self) -> MongoClient[Any] | AsyncMongoClient[Any]:
        """The client of the handler's transactions."""
        return self._wiring.async_client if self.handler.is_async else self._wiring.client

    def _execute(self, call: Call) -> None:
        started = time.monotonic()
        self.claim = self._take_claim(started)
        self._first = self.claim.first
        try:
            self._beat = self._begin_beat(started)
        except RuntimeError as error:  # no thread can start, so the claim would lapse, and count as a crash
            self._wait_for_thread(error)
        token = current.set(self)
        try:
            decision = self._load() or self._run_parts(call)
            outcome = self._settle(decision) if decision else None
        finally:
            current.reset(token)
            if not self._is_owed:
                self._beats.end(self._beat)
        if outcome is not None and outcome.raises is not None:
            raise outcome.raises

    # -- the claim ---------------------------------------------------------------------------------

    def _begin_beat(self, started: float) -> Heartbeat:
        renew, withdraw = not self.handler.transactional, self.subject.withdraw
        return self._beats.begin(self.claim, started, ttl=self._ttl, renew=renew, withdraw=withdraw)

    def _wait_for_thread(self, error: RuntimeError) -> NoReturn:
        """Let the change wait, with growing pauses, because the process cannot renew its claim."""
        claim, cause = self.claim, f"a worker's process cannot start a thread: {error_text(error)}"
        wait = self.subject.postpone(claim, cause, WAITS.nth(claim.waits), is_doubtful=False)
        try:
            if wait.write():
                _report(wait)
        except PyMongoError:
            self._relinquish(claim.owner)
        raise Ignore from error

    def _take_claim(self, started: float) -> Claim:
        """Return the claim. If the first attempt gets no answer, try once more."""
        for is_last in (False, True):
            try:
                return self._try_claim(started)
            except PyMongoError as error:
                if is_last or not is_transient(error):
                    raise Ignore from error
        raise AssertionError("the last attempt returns or raises")

    def _try_claim(self, started: float) -> Claim:
        where, owner = name_place(self.subject.run.partition_id), new_owner()
        client, session = self._client, None
        try:
            if self.session is not None:
                if isinstance(client, AsyncMongoClient):  # it has no sessions before it is connected
                    EVENT_LOOP.get().run(client.aconnect)
                session = self.session.session_id["id"]
                self._end_lapsed_transaction()  # its locks would block the handler
            claim = self.subject.take_claim(owner, self._ttl, session)
        except SoftTimeLimitExceeded as error:
            self._relinquish(owner)
            raise Ignore from error
        except PyMongoError as error:
            renew_connections(self._wiring.client, error)
            text = explain_error(error, self._wiring.state_concern) or brief(error)
            logger.warning("the worker could not claim partition %s: %s", where, text, extra={"event": "claim_failed"})
            if error.timeout:
                with suppress(PyMongoError, SoftTimeLimitExceeded):
                    self._end_lapsed_transaction()  # it may have locked the partition
            self._relinquish(owner)
            raise
        if claim is None:
            logger.debug(
                "the worker dropped a message of partition %s, which is a duplicate, too old or too early", where
            )
            raise Ignore
        if time.monotonic() - started > self._ttl / 2:
            text = "the worker claimed partition %s too late, so it drops the message. The listener sends it again"
            logger.warning(text, where, extra={"event": "claim_late"})
            self._relinquish(owner)
            raise Ignore
        return claim

    def _end_lapsed_transaction(self) -> None:
        where = self.subject.run.partition_id
        if self._claims.end_transactions([where]):
            logger.warning(
                "the worker has ended a transaction of partition %s that an earlier worker left open",
                name_place(where),
                extra={"event": "transaction_ended"},
            )

    def _relinquish(self, owner: str) -> None:
        """End an unused claim, now or when MongoDB answers again. If it lapsed, that would count as a crash."""
        where, subject = self.subject.run.partition_id, self.subject
        try:
            if subject.relinquish(owner):
                return
        except (PyMongoError, SoftTimeLimitExceeded) as error:
            logger.warning(
                "the worker could not end its claim of partition %s, and tries again: %s",
                name_place(where),
                error_text(error),
                extra={"event": "claim_not_ended"},
            )
        self._wiring.of_process(DeferredWrites).add(
            f"the end of a claim of partition {name_place(where)}",
            lambda: subject.relinquish(owner) or subject.withdraw(owner),
            answers=_LOST_CLAIM_ANSWERS,
        )

    def _check_claim(self) -> None:
        """Raise SupersededError if a newer execution has replaced this one. Called after a target refused a write."""
        claim = self.claim
        try:
            is_mine = self._persist(lambda: self._claims.is_mine(claim), name_place(claim.partition_id))
        except (PyMongoError, SoftTimeLimitExceeded) as error:
            self._relinquish(claim.owner)
            raise Ignore from error
        if not is_mine:
            raise SupersededError

    # -- the loop ----------------------------------------------------------------------------------

    def _load(self) -> Decision:
        """Read the changes. Return a decision if the handler must not get the first one."""
        claim, subject = self.claim, self.subject
        decision = subject.load(claim)
        if not decision and claim.crashes > self._options.max_crashes:
            message = (
                f"The worker ended {claim.crashes} times while handling {subject.describe(0)}. "
                + (f"The last recorded reason: {claim.error}. " if claim.error else "")
                + "Search the worker's log for a signal, the out-of-memory killer or a hard time limit."
            )
            return subject.fail(claim, 0, HandlerCrashedError(message, crashes=claim.crashes))
        return decision

    def _run_parts(self, call: Call) -> Decision:
        """Give the changes to the handler, part by part. Return nothing if its transaction has stored the outcome."""
        parts = self._parts = self._plan_parts()
        self._halfway = (time.monotonic() + self._until) / 2
        while True:
            if parts.failed is not None and self._is_settled:
                return self._decide_failure()
            if not parts.has_more or self._must_end():
                break
            decision = self._run_part(call)
            if decision is not None:
                return decision
        if parts.begin == self._recorded:
            return [self.subject.release(self.claim)]
        return self.subject.succeed(self.claim, parts.begin)

    def _plan_parts(self) -> Parts:
        """Plan the run up to the first change with a parked key. After a crash, plan only the first change."""
        claim, handler, changes = self.claim, self.handler, self.subject.run.changes
        count = len(changes)
        if count > 1 and (claim.crashes or claim.parked):
            count = next((at for at in range(1, count) if claim.crashes or self.subject.is_parked(claim, at)), count)
        documents = [read_document_key(raw) for raw in changes[:count]] if handler.coalesce and count > 1 else None
        # A listener of another deploy may send more changes than the handler takes.
        most = 1 if handler.transactional and handler.batch_size is None else handler.batch_size or count
        is_known = bool(claim.retries or claim.waits or claim.passed_over)  # its counts belong to no other change
        return Parts(count, documents, most=most, head_alone=is_known and handler.is_parted)

    @property
    def _runs(self) -> RunSubject:
        """The subject, which must be a run: a replay has one change, so it is never split and records no progress."""
        assert isinstance(self.subject, RunSubject), "a replay has one change"
        return self.subject

    @property
    def _recorded(self) -> int:
        """The offset of the claim's first change. The position is after the changes before it."""
        return self.claim.first - self._first

    @property
    def _is_settled(self) -> bool:
        """True if the failing change is known, and all changes before it are finished."""
        failed = self._parts.failed
        return failed is not None and not self._parts.list_remaining(failed)

    def _must_end(self) -> bool:
        """Return True if no further part of the run may begin."""
        if self._beat.lost:
            return True
        return bool(self._parts.begin) and time.monotonic() > self._until and not self._parts.is_closing

    def _run_part(self, call: Call) -> Decision | None:
        """Give the next part to the handler. Return a decision if it ends the execution."""
        parts, given, started = self._parts, self._parts.next_offsets(), time.monotonic()
        self.attempt = Attempt()
        try:
            count = self._give(given, call) if given else 0
        except SupersededError:
            self._leave()
            raise
        except Exception as error:  # noqa: BLE001 - whatever a handler raises becomes an outcome
            if is_raised_by_shutdown(error):
                self._crash(error, given)
            if not self.attempt.is_committed:
                return self._handle_failure(error, given)
            logger.debug("partition %s is committed, whatever comes after", name_place(self.claim.partition_id))
            count, self._until = len(given), min(self._until, time.monotonic())  # a time limit is used up
        except BaseException as error:  # noqa: BLE001 - it is raised again where it may be
            self._crash(error, given)
        if count < len(given):
            parts.finish(given[:count])
            return self._pause(given[count])
        is_last = parts.is_last
        parts.complete()
        if self.attempt.is_committed:
            if is_last:
                _report(self.subject.succeed(self.claim, parts.begin)[0])
                return []
            self._follow(parts.begin, started)
        elif parts.has_more:
            self._advance(parts.begin)
        return None

    def _give(self, given: Sequence[int], call: Call) -> int:
        """Call the handler with these changes. Return the number of finished ones, which is smaller after a pause."""
        started, retries, subject = time.monotonic(), self.claim.retries, self.subject
        takes_list = self.handler.batch_size is not None
        changes = subject.iterate_changes(self.claim, given)
        parts: Iterable[Sequence[int]] = [given] if takes_list else zip(given, strict=True)
        for place, offsets in enumerate(parts):
            if place and self._must_pause(started):
                return place
            self.attempt.offset = offsets[0]
            self._calls += 1
            try:
                if takes_list:
                    call(Changes(changes), retries)
                else:
                    call(next(changes), 0 if place else retries)
            except Ignore as ignored:
                if isinstance(ignored, SupersededError):
                    raise
                what, count = subject.describe(offsets[0]), len(offsets)
                logger.info(
                    "the handler raised Ignore, so %s counts as handled (changes: %d)",
                    what,
                    count,
                    extra={"event": "change_ignored"},
                )
            except BaseException:
                if not takes_list:
                    self.attempt.failed = place
                raise
        return len(given)

    def _must_pause(self, started: float) -> bool:
        """Return True if work is due before the next call of a part that began at this time."""
        now = time.monotonic()
        if self._beat.lost or now - started > _PROGRESS_SECONDS:
            return True
        return now > self._until and (self._is_limited or not self._parts.is_closing)

    def _pause(self, following: int) -> Decision | None:
        """Record the finished changes between two calls. End the run if its time is over or soon will be."""
        parts, now = self._parts, time.monotonic()
        if self._beat.lost:
            return None
        done, is_over = parts.reach(0), now > self._until
        if self._is_limited and is_over and parts.failed is None:
            # With nothing finished, make one more call: otherwise the same run would be sent again.
            parts.stop(done or parts.reach(1))
        elif self._is_limited and now > self._halfway and done < following and not parts.is_closing:
            parts.stop(parts.reach(self._calls))  # those calls took half of the time
        elif is_over and not parts.is_closing:
            parts.stop(following)
        elif done > parts.begin:
            self._advance(done)
            parts.begin = done  # while the part continues
        if self._is_limited and is_over and self._failure is not None:
            return self._split_up(self._failure.error)
        return None

    # -- progress ----------------------------------------------------------------------------------

    def _advance(self, end: int, passed_over: Mapping[str, Any] | None = None) -> None:
        """
        Record that all changes before an offset are done, and make the change at the offset the claim's first.

        Raises:
            Ignore: a newer execution decides, or MongoDB does not answer and the process records it later.
        """
        if end > self._recorded:
            started = time.monotonic()
            self._beats.end(self._beat)  # it renews a claim with the previous first change
            self._settle([self._runs.advance(self.claim, end, passed_over)])
            self._follow(end, started, passed_over)

    def _record_finished(self, failed: int) -> None:
        """Record the changes before the failed one, and those that it replaces."""
        offsets = reversed(self._parts.list_superseded(failed))
        tokens = [token_data(self.subject.read_token(offset)) for offset in offsets]
        self._advance(failed, {"count": len(tokens), "tokens": tokens[-_NAMED_MAX:]} if tokens else None)

    def _follow(self, end: int, started: float, passed_over: Mapping[str, Any] | None = None) -> None:
        """Continue after the recorded changes. The write that recorded them began at this monotonic time."""
        self._beats.end(self._beat)
        self.claim = replace(
            self.claim, first=self._first + end, retries=0, crashes=0, waits=0, doubts=0, passed_over=passed_over
        )
        self._beat = self._begin_beat(started)

    def _extend_claim(self) -> None:
        """
        Renew a claim between two transactions, if it must outlast the next one and is not renewed during it.

        Raises:
            Ignore: a newer execution decides, or MongoDB does not answer.
        """
        claim, started = self.claim, time.monotonic()
        try:
            lost = self._persist(lambda: bool(self._claims.extend([claim])), name_place(claim.partition_id))
        except (PyMongoError, SoftTimeLimitExceeded) as error:
            self._defer(self.subject.release(claim), error)
        if lost:
            self._supersede("renewal")
        self._beat.renewed = started

    def write_in_transaction(self, session: Session) -> Steps[None]:
        """
        Write the current part's outcome as the last write of the handler's transaction, as steps.

        Raises:
            SupersededError: a newer execution decides.
        """
        parts = self._parts
        write = self.subject.succeed_inside if parts.is_last else self._runs.advance_inside
        if not (yield from write(session, self.claim, parts.end)):
            raise SupersededError

    def find_session(self, handler: Handler) -> Session | None:
        """Return the session for this handler's transaction. None if one handler calls another, or itself."""
        is_free = self.session is not None and not self.session.in_transaction
        return self.session if is_free and self.handler is handler else None

    def give_session(self) -> Session:
        """Hand the session of the handler's transactions to a caller, which then ends it."""
        session, self.session = self.session, None
        assert session is not None, "a transactional handler has one session"
        return session

    def note_commit(self) -> None:
        """Note that the handler's transaction has committed. Before that, the body may still run again and fail."""
        self.attempt.is_committed = True

    # -- failures ----------------------------------------------------------------------------------

    def _handle_failure(self, error: Exception, given: Sequence[int]) -> Decision | None:
        """Find the failed change of a part, or give fewer changes the next time."""
        parts, place = self._parts, 0 if len(given) == 1 else self.attempt.failed
        if isinstance(error, StaleFencingTokenError | OutdatedChangeError):
            self._check_claim()
        if place is None:
            if waiting := self._wait_with_list(error):
                return waiting
            place = self._find_unreadable(error, given)
        elif not self.handler.transactional:
            parts.finish(given[:place])
        if place is not None:
            parts.fail(given[place])
            self.attempt.offset, self.attempt.error = given[place], error
            self._failure = self.attempt
        # A canceled coroutine that has not ended may still use the session.
        is_free = self.session is not None and not self.session.in_transaction
        is_over = self.handler.transactional and not is_free and not self._is_settled
        if is_over or self._needs_time(error, given):
            return self._split_up(error)
        if place is None:
            logger.info(
                "a list of %d changes has failed, so the handler gets half of them next: %s",
                len(given),
                error_text(error),
                extra={"event": "list_split", "partition": self.claim.partition_id},
            )
            parts.split(given)
        if self.handler.transactional and not self._is_settled:
            self._extend_claim()
        return None

    def _wait_with_list(self, error: Exception) -> Decision | None:
        """Let all changes wait for the end of an outage, or of another run of `once`."""
        is_retry = isinstance(error, Retry) and not isinstance(error, RunningElsewhereError)
        reason = None if is_retry or error is self.attempt.exhausted else self._judge(error)
        if reason is None or reason.doubts_max is not None:
            return None
        return self._wait(self._recorded, reason, error)

    def _find_unreadable(self, error: Exception, given: Sequence[int]) -> int | None:
        """Return the place of the first change that cannot be decoded, if it caused the error."""
        if not isinstance(error, BSONError):
            return None
        for place, change in enumerate(self.subject.iterate_changes(self.claim, given)):
            try:
                change.raw.get("_id")
            except BSONError:
                return place
        return None

    def _needs_time(self, error: Exception, given: Sequence[int]) -> bool:
        """Return True if a change used up the time that the run shares. In a separate message it gets its full time."""
        cause = error.exc if isinstance(error, Retry) else error
        had_all = self._calls == 1 and (self.handler.batch_size is None or len(given) == 1)
        if had_all or not self.handler.is_parted or not isinstance(cause, SoftTimeLimitExceeded):
            return False
        return isinstance(error, Retry) or error is self.attempt.exhausted or self._judge(error) is None

    def _split_up(self, error: Exception) -> Decision:
        """Let the listener send the remaining changes one by one."""
        if self._failure is not None and self._is_settled:
            self._record_finished(self._failure.offset)
        logger.warning(
            "the remaining changes of this run of partition %s are sent one by one, because one failed: %s",
            name_place(self.claim.partition_id),
            error_text(error),
            extra={"event": "list_ended", "partition": self.claim.partition_id},
        )
        return self._runs.split(self.claim, error)

    def _decide_failure(self) -> Decision:
        """Decide about the failed change, which becomes the claim's first."""
        assert self._failure is not None, "a change has failed"
        self.attempt, error, failed = self._failure, self._failure.error, self._failure.offset
        self._record_finished(failed)
        if isinstance(error, Retry) and not isinstance(error, RunningElsewhereError):
            try:
                return self.subject.retry(self.claim, failed, error, retry_time(error.when))
            except HandlerUsageError as unusable:
                error = unusable
        if isinstance(error, StaleFencingTokenError | OutdatedChangeError):
            self._check_claim()
        reason = None if error is self.attempt.exhausted else self._judge(error)
        if reason is not None:
            return self._wait(failed, reason, error)
        if isinstance(error, Reject) and error.args and isinstance(error.args[0], Exception):
            error = error.args[0]
        return self.subject.fail(self.claim, failed, error)

    def _wait(self, offset: int, reason: WaitReason, error: Exception) -> Decision:
        what = self.subject.describe(offset)
        return self.subject.wait(self.claim, what, reason.cause, error, is_doubtful=reason.doubts_max is not None)

    def must_wait(self, error: BaseException, named: Iterable[object]) -> bool:
        """Return True if the change must wait, although `autoretry_for` would count the error as an attempt."""
        return is_autoretried(error) and not names(named, error) and self._judge(error) is not None

    def _judge(self, error: BaseException) -> WaitReason | None:
        """
        Return the reason why the change waits. None if the handler itself has failed.

        If the handler's transaction may have caused the error itself, wait a limited number of times in a row.
        """
        attempt = self.attempt
        if attempt.judged is None or attempt.judged[0] is not error:
            attempt.judged = (error, self._find_reason(error))
        reason = attempt.judged[1]
        doubts = self.claim.doubts if attempt.offset == self._recorded else 0
        if reason is not None and reason.doubts_max is not None and doubts >= reason.doubts_max:
            return None
        return reason

    def _find_reason(self, error: BaseException) -> WaitReason | None:
        attempt = self.attempt
        if isinstance(error, RunningElsewhereError):
            return WaitReason(str(error.message))
        renew_connections(self._client, error)
        outage, conflict = infrastructure_cause(error), conflict_cause(error)
        if has_reached_limit(error, attempt.timeout):
            outage, conflict = attempt.outage, attempt.conflict or conflict
            if outage is None and conflict is None:
                # Slow servers, a slow body, or a body that waits for a lock of its own transaction.
                text = f"{_TOO_LONG} ({cause_text(error)})"
                return WaitReason(text, _TIME_OUTS_MAX if self._is_answered() else None)
        if outage is not None:
            return WaitReason(outage)
        return None if conflict is None else WaitReason(conflict, _DOUBTS_MAX)

    def _is_answered(self) -> bool:
        """Return True if MongoDB answers now, with a majority."""
        try:
            self._claims.is_mine(self.claim)
        except (PyMongoError, SoftTimeLimitExceeded):
            return False
        return True

    # -- the outcome -------------------------------------------------------------------------------

    def _settle(self, decision: Decision) -> Outcome:
        """
        Write the first outcome of a decision that can be stored, and return it.

        Raises:
            Ignore: a newer execution decides, or MongoDB does not answer and the process writes it later.
            Exception: none can be stored. The claim lapses, which is counted.
        """
        claim = self.claim
        forbidden: tuple[Outcome, Exception] | None = None
        for outcome in decision:
            try:
                accepted = self._persist(outcome.write, f"an outcome of partition {name_place(claim.partition_id)}")
            except Exception as error:
                if isinstance(error, SoftTimeLimitExceeded) or is_transient(error):
                    self._defer(outcome, error)
                forbidden = forbidden or ((outcome, error) if is_refused_user(error) else None)
                if outcome is decision[-1] and forbidden is not None:
                    self._defer(*forbidden)
                logger.error(
                    "MongoDB cannot store the outcome '%s' of partition %s. The worker stores a simpler one, waits for "
                    "the right, or lets the claim lapse: %s",
                    outcome.name,
                    name_place(claim.partition_id),
                    error_text(error),
                    extra={"event": "outcome_not_storable", "outcome": outcome.name},
                )
                if outcome is decision[-1]:
                    raise
                continue
            if not accepted:
                self._check_refusal(outcome)
            break
        _report(outcome)
        return outcome

    def _persist(self, write: Callable[[], bool], what: str) -> bool:
        return persist(self._claims, write, what, self._patience)

    def _check_refusal(self, outcome: Outcome) -> None:
        """Return if a refused outcome was stored before, with a lost answer. Otherwise end quietly."""
        end, where = "replaced", name_place(self.claim.partition_id)
        with suppress(PyMongoError):
            end = self._claims.find_end(self.claim)
        if end == "replaced":
            self._supersede(outcome.name)
        if self._may_have_committed:
            reason = "the handler's transaction, whose commit got no answer, has the outcome"
        elif end == "held" and outcome.name == "dead_letter":
            reason = "its key was just released, so the change runs again"
        elif end == "stored" and outcome.name != "progress":  # without its claim the run cannot continue
            return
        else:
            self._supersede(outcome.name)
        self._leave()
        logger.debug("the outcome '%s' of partition %s is not needed: %s", outcome.name, where, reason)
        raise SupersededError

    @property
    def _may_have_committed(self) -> bool:
        """True if a commit of the handler's transaction got no answer. It may be the end of the claim."""
        return self.handler.transactional and self.session is None

    def _supersede(self, outcome: str) -> NoReturn:
        """End quietly, because a newer execution has replaced this one."""
        self._leave()
        logger.warning(
            "the outcome '%s' of partition %s (fencing token %d) was refused: a newer execution has replaced it",
            outcome,
            name_place(self.claim.partition_id),
            self.claim.fencing_token,
            extra={"event": "outcome_refused", "outcome": outcome},
        )
        raise SupersededError

    def _leave(self) -> None:
        """End the claim if this execution still holds it. A refused write may have happened, with a lost answer."""
        where, owner = self.claim.partition_id, self.claim.owner
        try:
            if self._beat.charged:  # a crash of a replay, too, stays counted
                self._claims.relinquish(where, owner)
            else:
                self.subject.relinquish(owner)
        except PyMongoError:
            logger.debug("the worker could not end its claim of partition %s", name_place(where))

    def _defer(self, outcome: Outcome, error: Exception) -> NoReturn:
        """Let the process write an outcome as soon as MongoDB answers. Keep the claim alive until then."""
        claim, beat, beats, claims = self.claim, self._beat, self._beats, self._claims
        may_have_committed = self._may_have_committed
        logger.warning(
            "MongoDB does not answer, or refuses the worker's user. The worker writes the outcome '%s' of partition %s "
            "as soon as it answers: %s",
            outcome.name,
            name_place(claim.partition_id),
            error_text(error),
            extra={"event": "outcome_deferred", "outcome": outcome.name},
        )

        def write_late() -> bool:
            accepted = outcome.write()
            if not accepted and not may_have_committed and claims.find_end(claim) == "stored":
                accepted = True
            elif not accepted or outcome.name == "progress":  # no execution continues after it
                accepted = claims.relinquish(claim.partition_id, claim.owner) and accepted
            if not accepted and not beat.charged:  # the next owner may have counted this execution
                beats.withdraw(beat)
            if accepted:
                _report(outcome)
            return accepted

        self._wiring.of_process(DeferredWrites).add(
            f"the outcome '{outcome.name}' of partition {name_place(claim.partition_id)}",
            write_late,
            ended=lambda: beats.end(beat),
        )
        self._is_owed = True
        raise Ignore from error

    def _crash(self, error: BaseException, given: Sequence[int]) -> NoReturn:
        """
        Record once, best effort, that the process ends in the first unfinished change. Always raises.

        A signal outside a shutdown may come from a time limit. It is not counted for a limited number of times in a
        row.

        Args:
            error: the error that ends the process.
            given: the changes of the current part.
        """
        if self.handler.batch_size is None:
            self._parts.finish(given[: self.attempt.failed or 0])
        end = self._parts.reach(0)
        is_new = end > self._recorded
        doubts = 0 if is_new else self.claim.doubts
        seconds = time.monotonic() - self._since
        is_sent, reason = is_sent_away(error, seconds), describe_end(error, seconds)
        try:
            is_committed = self.attempt.is_committed
            if is_new and not is_committed:
                self._beats.end(self._beat)  # it renews a claim with the previous first change
                if not self._runs.advance(self.claim, end).write():
                    raise SupersededError
                self._follow(end, time.monotonic())
            subject, claim = self.subject, self.claim
            if is_committed:  # the part's outcome is stored, and no next change has begun
                self._claims.relinquish(claim.partition_id, claim.owner)
            elif is_sent and is_leaving():
                subject.release(claim).write()
            elif is_sent and doubts < _DOUBTS_MAX:
                subject.postpone(claim, _SIGNALLED, WAITS.nth(claim.waits), is_doubtful=True).write()
            else:
                subject.crash(claim, reason).write()
        except (PyMongoError, SupersededError):
            logger.warning(
                "the worker could not record its crash in partition %s. Its claim lapses, and the change runs again",
                name_place(self.claim.partition_id),
                extra={"event": "crash_not_recorded"},
            )
        if threading.current_thread() is threading.main_thread():
            raise error
        # A thread pool survives, and Celery does not acknowledge such a message: its prefetch would fill.
        raise Ignore from error


def persist(claims: Claims, write: Callable[[], bool], what: str, seconds: float) -> bool:
    """
    Write to the state, for a bounded time until MongoDB answers. Return True if the write was accepted.

    A connection whose user was dropped is replaced, as the user may have been created again.

    Raises:
        PyMongoError: the last attempt's error, or one that a repetition cannot fix.
    """

    def may_repeat(error: Exception) -> bool:
        claims.renew_connections(error)
        return is_transient(error) or is_logged_out(error)

    return retry_until_answered(
        write,
        repeatable=may_repeat,
        deadline=time.monotonic() + seconds,
        pauses=_PAUSES,
        note=lambda error: logger.warning(
            "the worker could not write %s, and tries again: %s",
            what,
            error_text(error),
            extra={"event": "outcome_failed"},
        ),
    )


def _report(outcome: Outcome) -> None:
    if outcome.report is not None:
        outcome.report()
