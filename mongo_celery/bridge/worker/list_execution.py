"""
One execution of a run that is not given change by change: lists for `on_changes`, and coalesced runs.

::

    claim -> all of the run -> handled -> (Celery publishes the commit link), as of every run
               |
               +- fails -> its first half ... -> the change that fails, alone: its outcome, under the same claim
                             |
                             +- done: recorded at once, the claim goes on behind it (`run_outcomes`)

What a list fails with counts against no change until one is alone, or named by the handler (`Changes.failed_at`). An
outage counts against none at all: the run waits. What was tried before is tried alone first, so that its attempts are
its own.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from bson.errors import BSONError
from celery.exceptions import Ignore, Retry, SoftTimeLimitExceeded

from mongo_celery.bridge.change import Change, describe
from mongo_celery.bridge.changes import ChangeFailed, Changes
from mongo_celery.bridge.error_text import error_text
from mongo_celery.bridge.worker.execution import Execution, SupersededError, current
from mongo_celery.bridge.worker.parts import Parts, document_of
from mongo_celery.errors import OutdatedChangeError, StaleFencingTokenError
from mongo_celery.outbox.once import RunningElsewhereError

if TYPE_CHECKING:
    from pymongo.client_session import ClientSession

    from mongo_celery.bridge.state.claims import Claim
    from mongo_celery.bridge.worker.outcomes import Outcomes

logger = logging.getLogger("mongo_celery.worker")

Call = Callable[[Any, int], None]


class ListExecution(Execution):
    """One delivery to a worker of a run that is given in parts; arguments as of `Execution`."""

    _parts: Parts
    _halfway: float
    _error: Exception | None = None
    _calls = 0

    def handle_in(self, session: ClientSession, change: Change) -> None:
        """The last write of a list's transaction; SupersededError when a newer execution decides."""
        del change
        parts, written = self._parts, self._written
        count = parts.end - self._recorded
        if parts.is_last and not self._recorded:
            accepted = written.handle_in(session, count)
        else:
            accepted = written.advance_in(session, count, ends=parts.is_last)
        if not accepted:
            raise SupersededError

    def _run_changes(self, claim: Claim, outcomes: Outcomes, call: Call) -> None:
        self._begin(outcomes)
        self._halfway = (time.monotonic() + self._until) / 2
        parts = self._parts = self._parts_of(claim)
        while True:
            if parts.failed is not None and not parts.owed(parts.failed):
                self._settle_failed(parts.failed)
            if not parts.has_more or self._must_end():
                break
            if self._run_part(claim, call):
                return
        self._end(parts.begin)

    def _parts_of(self, claim: Claim) -> Parts:
        """The run up to the first change whose key is parked; after a crash only its first one."""
        changes = self._run.changes
        ends = (offset for offset in range(1, len(changes)) if claim.crashes or self._is_parked(offset))
        count = next(ends, len(changes))
        documents = [document_of(raw) for raw in changes[:count]] if self.handler.coalesce and count > 1 else None
        most = self.handler.batch_size or count  # a listener of another deploy may have sent more
        is_known = bool(claim.retries or claim.waits or claim.passed_over)  # what is kept of it is of no other change
        return Parts(count, documents, most=most, head_alone=is_known)

    def _must_end(self) -> bool:
        if self._written.is_lost:
            return True
        return bool(self._parts.begin) and time.monotonic() > self._until and not self._parts.is_closing

    def _run_part(self, claim: Claim, call: Call) -> bool:
        """Give the next part; whether the whole run has ended with it, by its own transaction."""
        parts, given, started = self._parts, self._parts.given(), time.monotonic()
        self._handled_in_transaction = False
        self._met_outage = self._met_conflict = None
        try:
            count = self._give(claim, given, call) if given else 0
        except SupersededError:
            self._written.leave()
            raise
        except Ignore:
            logger.info("handler ignored %d changes", len(given), extra={"event": "change_ignored"})
            count = len(given)
        except Exception as error:  # noqa: BLE001 - whatever a handler raises becomes an outcome
            self._part_failed(claim, error, given)
            return False
        except BaseException as error:  # noqa: BLE001 - it is raised again where it may be
            if self.handler.batch_size is None:
                parts.finish(given[: self.told or 0])
            self._crash(error, parts.reach(0) - self._recorded)
        if count < len(given):
            parts.finish(given[:count])
            self._pause(given[count])
            return False
        is_last = parts.is_last
        parts.done()
        if self._handled_in_transaction:
            if not is_last:
                self._written.follow(parts.begin - self._recorded, started)
        elif parts.has_more:
            self._written.advance(parts.begin - self._recorded)
        self.claim = self._written.claim
        return self._handled_in_transaction and is_last

    def _give(self, claim: Claim, given: Sequence[int], call: Call) -> int:
        """Call the handler with these changes; how many of them are done, where there is to be a pause."""
        self.told, started = None, time.monotonic()
        run, retries = self._run, self._written.claim.retries
        if self.handler.batch_size is not None:
            changes = Changes(self._change(claim, run.changes[offset], offset) for offset in given)
            self._calls += 1
            call(changes, retries)
            return len(given)
        for place, offset in enumerate(given):
            if place and self._must_pause(started):
                return place
            try:
                self._calls += 1
                call(self._change(claim, run.changes[offset], offset), retries if place == 0 else 0)
            except SupersededError:
                raise
            except Ignore:
                logger.info("handler ignored %s", describe(run.changes[offset]), extra={"event": "change_ignored"})
            except BaseException:
                self.told = place
                raise
        return len(given)

    def _must_pause(self, started: float) -> bool:
        """Whether something is to be done before the next call of a part, of which the first began at this time."""
        if self._written.is_lost or self._is_progress_due(started):
            return True
        return time.monotonic() > self._until and (self._is_limited or not self._parts.is_closing)

    def _pause(self, following: int) -> None:
        """Between two calls of a part: record what is done, and end the run where its time is up or soon will be."""
        parts, now = self._parts, time.monotonic()
        if self._written.is_lost:
            return
        done, is_over = parts.reach(0), now > self._until
        if self._is_limited and is_over and parts.failed is None:
            # With nothing done there is one more call: a run that got nowhere would be sent again as it was.
            parts.stop(done or parts.reach(1))
        elif self._is_limited and now > self._halfway and done < following and not parts.is_closing:
            parts.stop(parts.reach(self._calls))  # which took half of the time
        elif is_over and not parts.is_closing:
            parts.stop(following)
        elif done > parts.begin:
            self._record(done)
            parts.pass_to(done)
        if self._is_limited and is_over and parts.failed is not None:
            assert self._error is not None, "it failed with something"
            self._written.single_out(self._error)

    def _part_failed(self, claim: Claim, error: Exception, given: Sequence[int]) -> None:
        """Find out which change it is, or give less the next time; raises where the execution ends with it."""
        parts, place = self._parts, 0 if len(given) == 1 else self.told
        if isinstance(error, StaleFencingTokenError | OutdatedChangeError):
            self._check_stale(self._written.claim)
        if place is None:
            self._wait_for_outage(error)
            place = self._unreadable(claim, given, error)
        elif not self.handler.transactional:
            parts.finish(given[:place])
        if place is not None:
            parts.fail(given[place])
            self._error = error
        is_over = self.handler.transactional and self.session is None and not self._is_settled
        if is_over or self._needs_time(error, given):
            self._send_one_by_one(error)
        if place is None:
            logger.info(
                "%d changes have failed together, the next list has half of them: %s",
                len(given),
                error_text(error),
                extra={"event": "list_split", "partition": self._run.partition_id},
            )
            parts.split(given)
        if self.handler.transactional and not self._is_settled:
            self._written.renew()

    def _unreadable(self, claim: Claim, given: Sequence[int], error: Exception) -> int | None:
        """The place of the first change that cannot be decoded, where that is what was met."""
        if not isinstance(error, BSONError):
            return None
        for place, offset in enumerate(given):
            try:
                self._change(claim, self._run.changes[offset], offset).raw.get("_id")
            except BSONError:
                return place
        return None

    @property
    def _is_settled(self) -> bool:
        """Whether the change that fails is known, and nothing is to be given before it."""
        failed = self._parts.failed
        return failed is not None and not self._parts.owed(failed)

    def _wait_for_outage(self, error: Exception) -> None:
        """Wait with all changes for an outage or another run of `once`. What is in doubt shows when it is alone."""
        is_retry = isinstance(error, Retry) and not isinstance(error, RunningElsewhereError)
        if is_retry or error is self._decided:
            return
        waiting = self._waiting_for(error)
        if waiting is not None and waiting.doubts_max is None:
            self._written.wait(waiting, describe(self._written.run.changes[0]), error)

    def _needs_time(self, error: Exception, given: Sequence[int]) -> bool:
        """Whether it ran out of time that it had to share: alone, in a message of its own, it has all of it."""
        cause = error.exc if isinstance(error, Retry) else error
        had_all = self._calls == 1 and (self.handler.batch_size is None or len(given) == 1)
        if had_all or not isinstance(cause, SoftTimeLimitExceeded):
            return False
        return isinstance(error, Retry) or error is self._decided or self._waiting_for(error) is None

    def _send_one_by_one(self, error: Exception) -> None:
        failed = self._parts.failed
        if failed is not None and self._is_settled:
            self._advance_to(failed)
        self._written.single_out(error)

    def _advance_to(self, failed: int) -> None:
        """Record what is done before a change, and what it stands for."""
        if failed > self._recorded:
            passed = [self._run.changes[offset] for offset in reversed(self._parts.passed_over(failed))]
            self._written.advance(failed - self._recorded, passed)
            self.claim = self._written.claim

    def _settle_failed(self, failed: int) -> None:
        """Write the outcome of the change that failed, which has become the claim's first; always raises."""
        error, written = self._error, self._written
        assert error is not None, "it failed with something"
        self._advance_to(failed)
        self.claim = written.claim
        self._first_failed(written.claim, written, self._run.changes[failed], error)


def telling(function: Callable[..., Any]) -> Callable[..., Any]:
    """
    The function of a bulk handler: the execution learns of its `ChangeFailed`, and the cause of that is what it raises.

    So whoever judges errors outside of it, `autoretry_for` and a transaction's driver too, sees the error itself.
    """

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        execution = current.get()
        if execution is None:  # called directly, in a unit test
            return function(*args)
        # A handler may call that of another one, whose word about its own list is none about this one.
        is_own = isinstance(execution, ListExecution) and execution.handler.function is function
        if is_own:
            execution.told = None
        try:
            return function(*args)
        except ChangeFailed as failed:
            if is_own and failed.changes is args[-1]:  # of a list of its own making nobody knows what was finished
                execution.told = failed.place
            error = failed.error
            if error is None or isinstance(error, Ignore):  # what passes over a change is no failure of one
                raise
        raise error

    return run
