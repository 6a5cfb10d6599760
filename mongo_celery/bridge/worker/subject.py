"""
The subject of an execution: the changes that it gives to the handler, and the records of their outcomes.

A **run** (`RunSubject`) has the effect of one chain for each change: changes of one partition, after its position. A
replay (`ReplaySubject`) has one change, and moves no position. `Execution` uses one loop for both.

An offset in the run identifies a change.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import bson
import pymongo
from celery.exceptions import Ignore, SoftTimeLimitExceeded
from pymongo.errors import PyMongoError

from mongo_celery.bridge.change import Change, Unread, describe, read_token, token_data
from mongo_celery.bridge.existing import dead_letter_name, is_existing, is_unread
from mongo_celery.bridge.fenced.fence import Fence, Origin
from mongo_celery.bridge.partitioning import make_origin
from mongo_celery.bridge.state.backlog import StoredChange, backlog_id, holds_token, refuse_damaged
from mongo_celery.bridge.state.claims import (
    PARKED_MAX,
    Claim,
    build_advance,
    build_finished,
    build_handled,
    name_place,
)
from mongo_celery.bridge.state.dead_letters import (
    FAILED,
    PARKED,
    PARKED_BEHIND,
    SKIPPED,
    KeptChange,
    Place,
    dead_letter,
    iterate_forms,
)
from mongo_celery.bridge.stream.source import strip_flags
from mongo_celery.bridge.worker.attribution import cause_text
from mongo_celery.bridge.worker.outcome import NOT_STORABLE, Decision, Outcome, ignore, retry_text
from mongo_celery.bridge.worker.runtime import WorkerRuntime
from mongo_celery.errors import CommandRefusedError, HandlerCrashedError, RefusedChangeError
from mongo_celery.mongo.repeating import Pauses
from mongo_celery.mongo.steps import Session, Steps
from mongo_celery.mongo.verdicts import error_text, storable, traceback_text
from mongo_celery.signals import change_dead_lettered, change_halted, send_signal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from datetime import datetime

    from bson.binary import Binary
    from bson.codec_options import CodecOptions
    from celery.exceptions import Retry

    from mongo_celery.bridge.handlers import Handler
    from mongo_celery.bridge.wiring import Wiring
    from mongo_celery.bridge.worker.envelope import Run

logger = logging.getLogger("mongo_celery.worker")

WAITS = Pauses(first=0.5, longest=30.0, jitter=0.25)
"""Pauses between two attempts of a change that waits without counting them."""

_STORING_SECONDS = 2.0
_TOKEN_CHARS = 64
_CAUSES = {"dead_letter": FAILED, "skip": SKIPPED, "park_key": PARKED}
"""Causes of the dead letters of each failure policy."""

_BEHIND = "Its key is parked because of an earlier change, so its handler was not started."
_FULL = (
    "{count} keys of this partition are parked, which is the limit. Look at them with `{look}`, replay or discard "
    "some, then run `{retry}`. The handler's error: {error}"
)
_MISSING = (
    "%s. The worker tries again, and counts no attempt. Restore the collection `backlog` from a backup, and find the "
    "program that removed the document"
)


class Subject(ABC):
    """
    The subject of one execution.

    Args:
        wiring: gives state and clients.
        handler: the handler to call.
        run: the verified envelope.
        patience: seconds that the execution waits for MongoDB.

    Attributes:
        run: the run, with the bytes of its changes after `load`.
        runtime: the runtime of the bridge in this process.
        replays: True if a change was a dead letter.
    """

    replays = False

    def __init__(self, wiring: Wiring, handler: Handler, run: Run, patience: float) -> None:
        self.run = run
        self._wiring = wiring
        self._handler = handler
        self._patience = patience
        self.runtime = wiring.of_process(WorkerRuntime)
        self._store = self.runtime.store
        self._codec = self.runtime.codec
        self._view = self.runtime.view(handler)
        self._tokens: dict[int, Mapping[str, Any]] = {}

    # -- what the handler gets -----------------------------------------------------------------------

    @abstractmethod
    def take_claim(self, owner: str, ttl: float, session: Binary | None) -> Claim | None:
        """Claim the partition. Return None for a message that is a duplicate, stale or early."""

    @abstractmethod
    def load(self, claim: Claim) -> Decision:
        """Read the changes. Return an outcome if the handler must not get the first one, or None if it may start."""

    def relinquish(self, owner: str) -> bool:
        """End an unused claim, without counting a start. Return False if there is none."""
        return self._store.claims.relinquish(self.run.partition_id, owner)

    def withdraw(self, owner: str) -> bool:
        """Withdraw the crash that was counted for an owner in this process. Return False if there is none."""
        return self._store.claims.withdraw(self.run.partition_id, owner)

    def iterate_changes(self, claim: Claim, offsets: Iterable[int]) -> Iterator[Change]:
        """Yield changes for the handler, each decoded at first use. What a list's hundreds share is computed once."""
        run, codec, token, replays, view = self.run, self._codec, self.token(claim), self.replays, self._view
        fence, named = partial(self.fence, claim.rewound), self._wiring.collection
        for offset in offsets:
            event = Unread(partial(_decode, run.changes[offset], codec))
            seq = self.sequence_number(offset)
            yield Change(event, run.index, seq, token, None, replays, fence, named, view)

    def describe(self, offset: int) -> str:
        """Return the name of a change in logs."""
        return describe(self.run.changes[offset])

    def read_token(self, offset: int) -> Mapping[str, Any]:
        """Return a change's resume token from its bytes, because a handler could alter its event."""
        if offset not in self._tokens:
            run = self.run
            self._tokens[offset] = run.token if run.token is not None else read_token(run.changes[offset])
        return self._tokens[offset]

    def sequence_number(self, offset: int) -> int:
        """Return the sequence number of a change."""
        return self.run.first + offset

    def token(self, claim: Claim) -> int:
        """Return the fencing token that targets see."""
        return claim.fencing_token

    def fence(self, rewound: int, change: Change) -> Fence:
        """Return the fence for targets: the token, and the change's place if other partitions may write the target."""
        run = self.run
        key, origin = f"{run.bridge}/{run.subscription}", self._origin(change.seq - run.first, rewound)
        return Fence(key, run.partitioning, run.index, change.fencing_token, origin)

    def _origin(self, offset: int, rewound: int) -> Origin | None:
        """Return the change's origin. None if all changes of a document are in this partition."""
        if self._handler.partitioner(self._wiring.options).is_by_document:
            return None
        return make_origin(self.run.changes[offset], self.read_token(offset), rewound)

    def is_parked(self, claim: Claim, offset: int) -> bool:
        """Return True if a change's key is parked. The change then becomes the first of a new run."""
        del claim, offset
        return False

    # -- outcomes ----------------------------------------------------------------------------------

    @abstractmethod
    def succeed(self, claim: Claim, end: int) -> Decision:
        """Decide the outcome after all changes before an offset are done."""

    @abstractmethod
    def succeed_inside(self, session: Session, claim: Claim, end: int) -> Steps[bool]:
        """Write this outcome in the transaction of the handler, as steps. Return False if a newer execution decides."""

    @abstractmethod
    def fail(self, claim: Claim, offset: int, error: Exception) -> Decision:
        """Decide the outcome of a change that failed permanently."""

    @abstractmethod
    def last_resort(self, claim: Claim, offset: int, what: str, error: BaseException) -> Outcome:
        """Return the outcome if details cannot be stored. It contains only fixed words."""

    @abstractmethod
    def release(self, claim: Claim, raises: BaseException | None = None) -> Outcome:
        """Return the outcome that only ends the claim."""

    @abstractmethod
    def crash(self, claim: Claim, error: str) -> Outcome:
        """Return the outcome of a process that ends during the claim's first change."""

    def retry(self, claim: Claim, offset: int, retry: Retry, due: tuple[datetime | None, float | None]) -> Decision:
        """Decide to retry a change at its retry time."""
        parked = Outcome("retry", partial(self._write_retry, claim, retry, *due), retry)
        return [parked, self.last_resort(claim, offset, "The retry", retry)]

    @abstractmethod
    def _write_retry(self, claim: Claim, retry: Retry, not_before: datetime | None, delay: float | None) -> bool:
        """Record that a handler requests a retry of its change."""

    def wait(self, claim: Claim, what: str, cause: str, error: BaseException, *, is_doubtful: bool = False) -> Decision:
        """
        Decide to wait for infrastructure to return.

        Args:
            what: names the change in the log.
            is_doubtful: True if the handler may be the cause.
        """
        delay = WAITS.nth(claim.waits)
        logger.warning(
            "%s waits, and runs again in %.1f s: %s",
            what,
            delay,
            cause,
            extra={"event": "change_waiting", "partition": claim.partition_id},
        )
        causes = (storable(cause), "not storable")
        return [self.postpone(claim, each, delay, is_doubtful=is_doubtful, raises=ignore(error)) for each in causes]

    def postpone(
        self, claim: Claim, cause: str, delay: float, *, is_doubtful: bool, raises: BaseException | None = None
    ) -> Outcome:
        """Return an outcome: the first change waits for these seconds, and no attempt is counted."""
        return Outcome("waiting", partial(self._write_wait, claim, cause, delay, doubtful=is_doubtful), raises)

    @abstractmethod
    def _write_wait(self, claim: Claim, cause: str, delay: float, *, doubtful: bool) -> bool:
        """Record that a change waits."""


class RunSubject(Subject):
    """Changes of one partition, after its position. Arguments as in `Subject`."""

    _is_stored = False

    # -- what the handler gets -----------------------------------------------------------------------

    def take_claim(self, owner: str, ttl: float, session: Binary | None) -> Claim | None:
        """Claim the run if its partition is free and at its first change."""
        run = self.run
        return self._store.claims.take(
            run.partition_id,
            owner=owner,
            term=run.term,
            first=run.first,
            last=run.last,
            token=run.stored[0] if run.stored else token_data(self.read_token(0)),
            ttl=ttl,
            session=session,
            living=self.runtime.heartbeats.living(run.partition_id),
            expected=run.fencing_token,
        )

    def load(self, claim: Claim) -> Decision:
        """Fetch stored changes. If the first one has a parked key or was refused, do not give it to its handler."""
        if self.run.stored and (waiting := self._fetch(claim)):
            return waiting
        refusal = self.run.refusal
        if (
            claim.parked and self.is_parked(claim, 0) and (refusal is None or not refusal.halts)
        ):  # it halts, whatever its key
            return self._queue_dead_letter(claim)
        return [] if refusal is None else self.fail(claim, 0, RefusedChangeError(refusal.reason))

    def _fetch(self, claim: Claim) -> Decision:
        """
        Read the bytes of stored changes.

        The run ends before a missing or damaged change, which becomes the first change of the next run. If the first
        change of a run is damaged, its partition halts. If it is missing, the partition waits, and no attempt is
        counted.
        """
        run = self.run
        what = f"change {run.first} of {name_place(run.partition_id)}"
        try:
            found = self._store.backlog.fetch(run.partition_id, run.stored)
        except (PyMongoError, SoftTimeLimitExceeded) as error:
            return self.wait(claim, what, cause_text(error), error)
        first = found.get(run.stored[0])
        if first is None:
            missing = f"the stored bytes of {what}, token {run.stored[0][:_TOKEN_CHARS]}, are missing"
            logger.error(_MISSING, missing, extra={"event": "stored_change_missing", "partition": run.partition_id})
            return self.wait(claim, what, missing, LookupError(missing))

        def is_whole(token: str) -> bool:
            # A refused change's bytes may lack a token. A change refused when stored may run today.
            raw = found[token].raw if token in found else b""
            return bool(raw) if run.refusal is not None else holds_token(raw, token)

        changes = tuple(found[token].raw for token in takewhile(is_whole, run.stored))
        if changes:
            self.run = replace(run, changes=changes)
        else:
            token = first.token or {"_data": run.stored[0]}
            if first.refusal is None:
                place = backlog_id(run.partition_id, run.stored[0])
                first = refuse_damaged(place, token, "they belong to another change")
            self.run = replace(run, changes=(b"",), refusal=first.refusal, token=token)
        self._is_stored = True
        return []

    def is_parked(self, claim: Claim, offset: int) -> bool:
        """Return True if the change's key was parked when the claim was made."""
        return bool(claim.parked) and self.run.find_hash(offset) in claim.parked

    # -- outcomes ----------------------------------------------------------------------------------

    def succeed(self, claim: Claim, end: int) -> Decision:
        """Decide the outcome after all changes before an offset are done."""
        claims = self._store.claims
        write = claims.finish if self._has_no_link(claim) else claims.handle
        return [Outcome("handled", partial(write, claim, *self.reach(end)))]

    def succeed_inside(self, session: Session, claim: Claim, end: int) -> Steps[bool]:
        """Write this outcome in the transaction of the handler."""
        build = build_finished if self._has_no_link(claim) else build_handled
        return self._store.claims.write_inside(session, claim, build(claim, *self.reach(end)))

    def _has_no_link(self, claim: Claim) -> bool:
        """Return True if no commit task follows the run, or its position has moved since the claim."""
        return self.run.is_inline or claim.first != self.run.first

    def advance(self, claim: Claim, end: int, passed_over: Mapping[str, Any] | None = None) -> Outcome:
        """
        Return the outcome after all changes before an offset are done. The claim continues at the offset.

        Args:
            passed_over: earlier changes that the change at the offset replaces.
        """
        row = self._token_of_existing(end)
        write = partial(self._store.claims.advance, claim, *self.reach(end), passed_over=passed_over, row=row)
        return Outcome("progress", write)

    def advance_inside(self, session: Session, claim: Claim, end: int) -> Steps[bool]:
        """Write this outcome in the transaction of the handler, as steps. Return False if a newer execution decides."""
        change = build_advance(*self.reach(end), self._token_of_existing(end))
        return self._store.claims.write_inside(session, claim, change)

    def split(self, claim: Claim, error: BaseException) -> Decision:
        """Decide to send the rest of the run one by one, so each change has its handler's full time."""
        return [Outcome("split", partial(self._store.claims.single_out, claim), ignore(error))]

    def release(self, claim: Claim, raises: BaseException | None = None) -> Outcome:
        """Return the outcome that only ends the claim."""
        return Outcome("release", partial(self._store.claims.relinquish, claim.partition_id, claim.owner), raises)

    def crash(self, claim: Claim, error: str) -> Outcome:
        """Return the outcome of a counted end of the process during the claim's first change."""
        return Outcome("crash", partial(self._store.claims.crash, claim, error))

    def fail(self, claim: Claim, offset: int, error: Exception) -> Decision:
        """Return the outcome of the failure policy for the claim's first change."""
        run, text = self.run, error_text(error)
        policy = self._handler.policy(self._wiring.options)
        if run.refusal is not None and run.refusal.halts:
            policy = "halt"
        elif is_unread(token_data(self.read_token(offset))) and policy in ("halt", "park_key"):
            policy = "dead_letter"  # no retry can read it, and its key is unknown
        if policy == "park_key" and len(claim.parked) >= PARKED_MAX:
            line, name = self._wiring.line, run.subscription
            look, retry = line.changes("dead-letters", "list", name), line.changes("retry", name)
            policy, text = "halt", _FULL.format(count=len(claim.parked), look=look, retry=retry, error=text)
        decision: list[Outcome] = []
        if policy == "discard":
            write = partial(self._store.claims.discard, claim, self.read_token(offset))
            report = partial(self._report_failure, offset, policy, error_text(error))
            decision.append(Outcome("discard", write, error, report))
        elif policy in _CAUSES:
            report = partial(self._report_failure, offset, policy, text)
            decision = self._bury(claim, offset, error, _CAUSES[policy], report)
        halt = partial(self._halt, claim, offset, text, error)
        decision.append(Outcome("halt", halt, error, partial(self._report_failure, offset, "halt", text)))
        return [*decision, self.last_resort(claim, offset, f"The error ({type(error).__name__})", error)]

    def _queue_dead_letter(self, claim: Claim) -> Decision:
        """Move the first change to the dead letters without running it, after those of its key."""
        return [
            *self._bury(claim, 0, None, PARKED_BEHIND, partial(self._report_parked_key, 0, "dead_letter")),
            Outcome(
                "halt", partial(self._halt, claim, 0, _BEHIND), Ignore(), partial(self._report_parked_key, 0, "halt")
            ),
            self.last_resort(claim, 0, "The dead letter", Ignore()),
        ]

    def _bury(
        self, claim: Claim, offset: int, error: Exception | None, cause: str, report: Callable[[], None]
    ) -> list[Outcome]:
        """Return the outcomes of a change that becomes a dead letter, the fullest form first."""
        write = partial(self._move_to_dead_letters, claim, offset, error, cause)
        raises = Ignore() if error is None else error
        forms = iterate_forms(self.run.changes[offset])
        return [Outcome("dead_letter", partial(write, form), raises, report) for form in forms]

    def last_resort(self, claim: Claim, offset: int, what: str, error: BaseException) -> Outcome:
        """Return a halt that stores only the place of the change."""
        text = NOT_STORABLE.format(what).encode("ascii", "replace").decode()
        report = partial(self._report_failure, offset, "halt", error_text(error))
        if isinstance(error, Ignore):
            report = partial(self._report_parked_key, offset, "halt")
        return Outcome("halt", partial(self._halt, claim, offset, text, is_plain=True), error, report)

    def _write_retry(self, claim: Claim, retry: Retry, not_before: datetime | None, delay: float | None) -> bool:
        return self._store.claims.park(claim, delay=delay, not_before=not_before, error=retry_text(retry))

    def _write_wait(self, claim: Claim, cause: str, delay: float, *, doubtful: bool) -> bool:
        return self._store.claims.wait(claim, delay=delay, cause=cause, doubtful=doubtful)

    def reach(self, end: int) -> tuple[int, dict[str, object]]:
        """Return number and token of the last change before an offset."""
        return self.run.first + end - 1, dict(self.read_token(end - 1))

    def _token_of_existing(self, offset: int) -> str | None:
        """Return the identity of a snapshot row, which has its own counts. None for other changes."""
        if offset >= len(self.run.changes):
            return None
        token = token_data(self.read_token(offset))
        return token if is_existing(token) else None

    def _halt(
        self, claim: Claim, offset: int, text: str, error: Exception | None = None, *, is_plain: bool = False
    ) -> bool:
        """Halt at the first change. Store it before: the halt may outlast the oplog, and commands need its bytes."""
        raw = self.run.changes[offset]
        token, key = self.read_token(offset), "?"
        if is_plain:
            token = {"_data": token_data(token)}
        else:
            key = describe(raw)
        self._keep(raw, offset)
        traceback = traceback_text(error) if error is not None and error.__traceback__ is not None else ""
        return self._store.claims.halt(claim, token, key, text, traceback)

    def _keep(self, raw: bytes, offset: int) -> None:
        """Try to store a change. If that fails, the listener may store it later, because it has also read it."""
        run = self.run
        if self._is_stored or run.refusal is not None:  # the listener has stored refused changes
            return
        change = StoredChange(token_data(self.read_token(offset)), raw, run.find_hash(offset))
        try:
            with pymongo.timeout(min(self._patience, _STORING_SECONDS)):
                self._store.backlog.insert(run.partition_id, [change], run.term)
        except Exception as error:  # noqa: BLE001 - whatever it is, the halt must be written
            logger.warning(
                "the worker could not store %s, at which its partition halts. The listener may store it later: %s",
                describe(raw),
                error_text(error),
                extra={"event": "halted_change_not_stored", "partition": run.partition_id},
            )
            return
        self._is_stored = True

    def _move_to_dead_letters(
        self, claim: Claim, offset: int, error: Exception | None, cause: str, form: Callable[[], KeptChange]
    ) -> bool:
        """Store the dead letter and skip its change. Return False also if its key was released meanwhile."""
        run, raw, token, kept = self.run, self.run.changes[offset], self.read_token(offset), form()
        letter = dead_letter(
            bridge=run.bridge,
            subscription=run.subscription,
            token=token,
            key=describe(raw),
            kept=kept,
            error=error_text(error) if error is not None else _BEHIND,
            traceback=traceback_text(error) if error is not None else "",
            attempts=count_attempts(claim, error) if error is not None else 0,
            place=Place(run.partitioning, run.index, claim.first, claim.fencing_token, run.find_hash(offset)),
            cause=cause,
            name=dead_letter_name(token_data(token), raw),
            passed_over=claim.passed_over,
        )
        self.runtime.ensure_indexes()
        return self._store.claims.set_aside(claim, token, letter, parks=cause == PARKED)

    def _report_failure(self, offset: int, policy: str, text: str) -> None:
        """Log a failure and the applied policy, and send its signal."""
        logger.error(
            "%s has failed permanently (failure_policy %s): %s",
            describe(self.run.changes[offset]),
            policy,
            text,
            extra={"event": "change_failed", "policy": policy, "partition": self.run.partition_id},
        )
        self._send(offset, _CAUSES.get(policy), text, is_halted=policy == "halt")

    def _report_parked_key(self, offset: int, policy: str) -> None:
        """Log that a change was not started, and send the signal."""
        logger.info(
            "%s was not started, because its key is parked (failure_policy %s)",
            describe(self.run.changes[offset]),
            policy,
            extra={"event": "change_behind", "policy": policy, "partition": self.run.partition_id},
        )
        self._send(offset, PARKED_BEHIND, _BEHIND, is_halted=policy == "halt")

    def _send(self, offset: int, cause: str | None, error: str, *, is_halted: bool) -> None:
        """Send the signal of a halt, or of a dead letter. With `discard`, there is none."""
        raw, line, run = self.run.changes[offset], self._wiring.line, self.run
        found = {"handler": run.subscription, "partition": run.index, "key": describe(raw), "error": error}
        if is_halted:
            command = line.on("retry", run.subscription, [run.index])
            send_signal(change_halted, run.bridge, **found, command=command)
        elif cause is not None:
            letter = dead_letter_name(token_data(self.read_token(offset)), raw)
            command = line.changes("dead-letters", "list", "--id", letter)
            send_signal(change_dead_lettered, run.bridge, **found, reason=cause, dead_letter=letter, command=command)


def _decode(raw: bytes, codec: CodecOptions[Any]) -> Mapping[str, Any]:
    return strip_flags(bson.decode(raw, codec))


def count_attempts(claim: Claim, error: BaseException) -> int:
    """Return the number of attempts. A change that crashed too often, or was refused, was not started again."""
    is_started = not isinstance(error, HandlerCrashedError | RefusedChangeError | CommandRefusedError)
    return claim.retries + claim.crashes + is_started
