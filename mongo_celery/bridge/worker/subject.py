"""
The subject of an execution: the changes that it gives to the handler, and the records of what happened to them.

A **run** (`RunSubject`) is what one chain for each change would be: changes of one partition, behind its position. The
replay of a dead letter (`ReplaySubject`) is one change, and moves no position. `Execution` serves both by one loop.

A change is known by its offset in the run.
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

from mongo_celery.bridge.change import Change, describe, read_token, token_data
from mongo_celery.bridge.existing import dead_letter_name, is_existing, is_unread
from mongo_celery.bridge.fenced.fence import Fence, Origin
from mongo_celery.bridge.partitioning import make_origin
from mongo_celery.bridge.state.backlog import StoredChange, backlog_id, holds_token, refuse_damaged
from mongo_celery.bridge.state.claims import PARKED_MAX, Claim
from mongo_celery.bridge.state.dead_letters import (
    FAILED,
    PARKED,
    PARKED_BEHIND,
    SKIPPED,
    Place,
    dead_letter,
    iterate_forms,
)
from mongo_celery.bridge.stream.source import strip_flags
from mongo_celery.bridge.worker.attribution import cause_text
from mongo_celery.bridge.worker.outcome import (
    NOT_STORABLE,
    Advanced,
    Crashed,
    DeadLettered,
    Decision,
    Discarded,
    Halted,
    Handled,
    Outcome,
    Released,
    Retrying,
    SplitUp,
    Waiting,
    ignore,
    retry_text,
)
from mongo_celery.bridge.worker.runtime import WorkerRuntime
from mongo_celery.errors import HandlerCrashedError, RefusedChangeError
from mongo_celery.mongo.repeating import Pauses
from mongo_celery.mongo.verdicts import error_text, storable, traceback_text

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from bson.binary import Binary
    from celery.exceptions import Retry
    from pymongo.client_session import ClientSession

    from mongo_celery.bridge.handlers import Handler
    from mongo_celery.bridge.wiring import Wiring
    from mongo_celery.bridge.worker.envelope import Run

logger = logging.getLogger("mongo_celery.worker")

WAITS = Pauses(first=0.5, longest=30.0, jitter=0.25)
"""Between two attempts of a change that waits, and of which nothing is counted."""

_STORING_SECONDS = 2.0
_TOKEN_CHARS = 64
_CAUSES = {"dead_letter": FAILED, "skip": SKIPPED, "park_key": PARKED}
"""Of the dead letters that failure policies leave."""

_POLICIES = {cause: policy for policy, cause in _CAUSES.items()}
_BEHIND = "Its key is parked: it waits behind an earlier change, and its handler was not started."
_FULL = (
    "{count} keys of this partition are parked, and there can be no more. Look at them with `{look}`, replay "
    "or discard some, then run `{retry}`. The handler's error: {error}"
)
_MISSING = (
    "%s: no attempt is counted, and the change is tried again. Restore the collection `backlog` from a backup, and "
    "stop whatever else removes its documents"
)


class Subject(ABC):
    """
    The subject of one execution.

    Args:
        wiring: gives state and clients.
        handler: the subscription's handler.
        run: the verified envelope.
        patience: seconds that the execution waits for MongoDB.

    Attributes:
        run: with the bytes of its changes once `load` has returned.
        runtime: the bridge's in this process.
        replays: whether a change is one that was a dead letter.
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

    # -- what is given -----------------------------------------------------------------------------

    @abstractmethod
    def take_claim(self, owner: str, ttl: float, session: Binary | None) -> Claim | None:
        """Claim the partition. None for a message that is a duplicate, stale or early."""

    @abstractmethod
    def load(self, claim: Claim) -> Decision:
        """Read the changes. Return the outcome of one that must not be given. Nothing where the handler may start."""

    def change(self, claim: Claim, offset: int) -> Change:
        """Return a change for the handler. It is decoded when it is first looked at."""
        raw, codec, run = self.run.changes[offset], self._codec, self.run
        return Change.unread(
            lambda: strip_flags(bson.decode(raw, codec)),
            partition=run.index,
            seq=self.sequence_number(offset),
            fencing_token=self.token(claim),
            replayed=self.replays,
            _fence=partial(self.fence, offset, claim.rewound),
            _named=self._wiring.collection,
            _view=self._view,
        )

    def describe(self, offset: int) -> str:
        """Return how logs name a change."""
        return describe(self.run.changes[offset])

    def read_token(self, offset: int) -> Mapping[str, Any]:
        """Return the resume token of a change: from its bytes, since a handler could change what it was given."""
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

    def fence(self, offset: int, rewound: int, change: Change) -> Fence:
        """Return what targets compare: the token, and the place of a change where others may write the same target."""
        run = self.run
        key = f"{run.bridge}/{run.subscription}"
        return Fence(key, run.generation, run.index, change.fencing_token, self._origin(offset, rewound))

    def _origin(self, offset: int, rewound: int) -> Origin | None:
        """None where all changes of a document are in this partition."""
        if self._handler.partitioner(self._wiring.options).is_by_document:
            return None
        return make_origin(self.run.changes[offset], self.read_token(offset), rewound)

    def is_parked(self, claim: Claim, offset: int) -> bool:
        """Return True if the key of a change is parked: then the change becomes the head of a run of its own."""
        del claim, offset
        return False

    # -- outcomes ----------------------------------------------------------------------------------

    def succeed(self, claim: Claim, end: int) -> Decision:
        """Decide about an execution after which all changes before an offset are done."""
        del claim
        return [Handled(end)]

    @abstractmethod
    def fail(self, claim: Claim, offset: int, error: Exception) -> Decision:
        """Decide about a change that failed permanently."""

    @abstractmethod
    def last_resort(self, offset: int, what: str, error: BaseException) -> Outcome:
        """Return the outcome where `what` cannot be stored: it has no words but ours."""

    def retry(self, offset: int, retry: Retry, due: tuple[datetime | None, float | None]) -> Decision:
        """Decide to try a change again at its retry time."""
        return [Retrying(retry, *due, raises=retry), self.last_resort(offset, "its retry", retry)]

    def wait(self, claim: Claim, what: str, cause: str, error: BaseException, *, is_doubtful: bool = False) -> Decision:
        """
        Decide to wait until infrastructure may be there again.

        Args:
            what: names the change in the log.
            is_doubtful: whether the handler may have caused it.
        """
        delay = WAITS.nth(claim.waits)
        logger.warning(
            "%s waits, next try in %.1f s: %s",
            what,
            delay,
            cause,
            extra={"event": "change_waiting", "partition": claim.partition_id},
        )
        causes = (storable(cause), "not storable")
        return [Waiting(each, is_doubtful, delay, raises=ignore(error)) for each in causes]

    @abstractmethod
    def write(self, claim: Claim, outcome: Outcome, session: ClientSession | None = None) -> bool:
        """
        Write an outcome under the claim. In the transaction of a session if there is one.

        Returns:
            False where a newer execution decides.
        """

    @abstractmethod
    def log_outcome(self, outcome: Outcome) -> None:
        """Log an outcome that was written."""


class RunSubject(Subject):
    """Changes of one partition, behind its position. Arguments as of `Subject`."""

    _is_stored = False

    # -- what is given -----------------------------------------------------------------------------

    def take_claim(self, owner: str, ttl: float, session: Binary | None) -> Claim | None:
        """Claim the run, where its partition is free and at its first change."""
        run = self.run
        return self._store.claims.take(
            run.partition_id,
            owner=owner,
            term=run.version,
            first=run.first,
            last=run.last,
            token=run.stored[0] if run.stored else token_data(self.read_token(0)),
            ttl=ttl,
            session=session,
            living=self.runtime.heartbeats.living(run.partition_id),
            inline=run.is_inline,
        )

    def load(self, claim: Claim) -> Decision:
        """Fetch changes that are stored. A parked key and a refusal keep the first one from its handler."""
        if self.run.stored and (waiting := self._fetch(claim)):
            return waiting
        refusal = self.run.refusal
        if (
            claim.parked and self.is_parked(claim, 0) and (refusal is None or not refusal.halts)
        ):  # such a one halts, whatever its key
            return self._queue_dead_letter()
        return [] if refusal is None else self.fail(claim, 0, RefusedChangeError(refusal.reason))

    def _fetch(self, claim: Claim) -> Decision:
        """
        Read the bytes of stored changes.

        The run ends before one that is not there, or is damaged: that becomes the first of another run. If it is the
        first of this run, its partition halts where it is damaged, and waits where it is missing, uncounted.
        """
        run = self.run
        what = f"change {run.first} of {run.partition_id}"
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
            # The bytes of what is refused may hold no token. And what was refused when it was stored may run today.
            raw = found[token].raw if token in found else b""
            return bool(raw) if run.refusal is not None else holds_token(raw, token)

        changes = tuple(found[token].raw for token in takewhile(is_whole, run.stored))
        if changes:
            self.run = replace(run, changes=changes)
        else:
            token = first.token or {"_data": run.stored[0]}
            if first.refusal is None:
                place = backlog_id(run.partition_id, run.stored[0])
                first = refuse_damaged(place, token, "they are not those of this change")
            self.run = replace(run, changes=(b"",), refusal=first.refusal, token=token)
        self._is_stored = True
        return []

    def is_parked(self, claim: Claim, offset: int) -> bool:
        """Return True if the key of a change was parked when the claim was taken."""
        return bool(claim.parked) and self.run.hash_at(offset) in claim.parked

    # -- outcomes ----------------------------------------------------------------------------------

    def fail(self, claim: Claim, offset: int, error: Exception) -> Decision:
        """Apply the failure policy to the claim's first change."""
        run, raw, text = self.run, self.run.changes[offset], error_text(error)
        policy = self._handler.policy(self._wiring.options)
        if run.refusal is not None and run.refusal.halts:
            policy = "halt"
        elif is_unread(token_data(self.read_token(offset))) and policy in ("halt", "park_key"):
            policy = "dead_letter"  # no retry can read it, and its key is not known
        if policy == "park_key" and len(claim.parked) >= PARKED_MAX:
            line, name = self._wiring.line, run.subscription
            look, retry = line.changes("dead-letters", "list", name), line.changes("retry", name)
            policy, text = "halt", _FULL.format(count=len(claim.parked), look=look, retry=retry, error=text)
        decision: list[Outcome] = []
        if policy == "discard":
            decision.append(Discarded(offset, raises=error))
        elif policy in _CAUSES:
            decision += [
                DeadLettered(offset, form, error, _CAUSES[policy], raises=error) for form in iterate_forms(raw)
            ]
        last = self.last_resort(offset, f"its failure ({type(error).__name__})", error)
        return [*decision, Halted(offset, text, raises=error), last]

    def _queue_dead_letter(self) -> Decision:
        """Move the first change to the dead letters, unstarted, behind those of its key."""
        forms, error = iterate_forms(self.run.changes[0]), Ignore()
        letters = [DeadLettered(0, form, None, PARKED_BEHIND, raises=error) for form in forms]
        return [*letters, Halted(0, _BEHIND, raises=error), self.last_resort(0, "what it waits for", error)]

    def last_resort(self, offset: int, what: str, error: BaseException) -> Outcome:
        """Return a halt that stores nothing of the change but its place."""
        text = NOT_STORABLE.format(what).encode("ascii", "replace").decode()
        return Halted(offset, text, is_plain=True, raises=error)

    def write(  # noqa: C901, PLR0911 - one update for each outcome
        self, claim: Claim, outcome: Outcome, session: ClientSession | None = None
    ) -> bool:
        """Write an outcome into the partition."""
        claims = self._store.claims
        match outcome:
            case Handled(end):
                if claim.first == self.run.first:
                    return claims.handle(claim, *self.reach(end), session)
                return claims.advance(claim, *self.reach(end), ends=True, session=session)
            case Advanced(end, passed_over):
                of = self._token_of_existing(end)
                return claims.advance(claim, *self.reach(end), passed_over=passed_over, of=of, session=session)
            case Retrying(retry, not_before, delay):
                return claims.park(claim, delay=delay, not_before=not_before, error=retry_text(retry))
            case Waiting(cause, is_doubtful, delay):
                return claims.wait(claim, delay=delay, cause=cause, doubtful=is_doubtful)
            case Halted():
                return self._halt(claim, outcome)
            case DeadLettered():
                return self._move_to_dead_letters(claim, outcome)
            case Discarded(offset):
                return claims.discard(claim, self.read_token(offset))
            case SplitUp():
                return claims.single_out(claim)
            case Crashed(error):
                return claims.crash(claim, error)
            case Released():
                return claims.relinquish(claim.partition_id, claim.owner)
        raise TypeError(f"a run has no outcome {outcome}")

    def reach(self, end: int) -> tuple[int, dict[str, object]]:
        """Return number and token of the last change before an offset."""
        return self.run.first + end - 1, dict(self.read_token(end - 1))

    def _token_of_existing(self, offset: int) -> str | None:
        """Return what tells a snapshot row: what is counted of it is its own. None for a change."""
        if offset >= len(self.run.changes):
            return None
        token = token_data(self.read_token(offset))
        return token if is_existing(token) else None

    def _halt(self, claim: Claim, outcome: Halted) -> bool:
        """Store the change before: what halts may outlast the oplog, and commands need its bytes."""
        raw = self.run.changes[outcome.offset]
        token, key = self.read_token(outcome.offset), "?"
        if outcome.is_plain:
            token = {"_data": token_data(token)}
        else:
            key = describe(raw)
        self._keep(raw, outcome.offset)
        return self._store.claims.halt(claim, token, key, outcome.text)

    def _keep(self, raw: bytes, offset: int) -> None:
        """Store a change, best effort: where it fails, the listener may store it later, for it has read it too."""
        run = self.run
        if self._is_stored or run.refusal is not None:  # the listener has stored what it refuses
            return
        change = StoredChange(token_data(self.read_token(offset)), raw, run.hash_at(offset))
        try:
            with pymongo.timeout(min(self._patience, _STORING_SECONDS)):
                self._store.backlog.insert(run.partition_id, [change], run.version)
        except Exception as error:  # noqa: BLE001 - whatever it is, the halt must be written
            logger.warning(
                "%s halts without being stored before: %s",
                describe(raw),
                error_text(error),
                extra={"event": "halted_change_not_stored", "partition": run.partition_id},
            )
            return
        self._is_stored = True

    def _move_to_dead_letters(self, claim: Claim, outcome: DeadLettered) -> bool:
        """Return False also where its key was released meanwhile: then the change is sent again, and runs."""
        run, raw, error = self.run, self.run.changes[outcome.offset], outcome.error
        token, kept = self.read_token(outcome.offset), outcome.form()
        letter = dead_letter(
            bridge=run.bridge,
            subscription=run.subscription,
            token=token,
            key=describe(raw),
            kept=kept,
            error=error_text(error) if error is not None else _BEHIND,
            traceback=traceback_text(error) if error is not None else "",
            attempts=count_attempts(claim, error) if error is not None else 0,
            place=Place(run.generation, run.index, claim.first, claim.fencing_token, run.hash_at(outcome.offset)),
            cause=outcome.cause,
            name=dead_letter_name(token_data(token), raw),
            passed_over=claim.passed_over,
        )
        self.runtime.ensure_indexes()
        return self._store.claims.set_aside(claim, token, letter, parks=outcome.cause == PARKED)

    def log_outcome(self, outcome: Outcome) -> None:
        """Log a failure with the policy that was applied, and a change that waits behind a parked key."""
        if not isinstance(outcome, (Halted, DeadLettered, Discarded)):
            return
        raw, partition = self.run.changes[outcome.offset], self.run.partition_id
        policy = _POLICIES.get(outcome.cause, "") if isinstance(outcome, DeadLettered) else outcome.name
        if isinstance(outcome.raises, Ignore):
            logger.info(
                "%s waits for its key, which is parked (%s)",
                describe(raw),
                outcome.name,
                extra={"event": "change_behind", "partition": partition},
            )
            return
        text = error_text(outcome.raises)
        if isinstance(outcome, Halted) and not outcome.is_plain:
            text = outcome.text
        logger.error(
            "%s failed for good, policy %s: %s",
            describe(raw),
            policy,
            text,
            extra={"event": "change_failed", "policy": policy, "partition": partition},
        )


def count_attempts(claim: Claim, error: BaseException) -> int:
    """Return how often a handler was tried: one that has crashed too often, or was refused, was not started again."""
    return claim.retries + claim.crashes + (not isinstance(error, HandlerCrashedError | RefusedChangeError))
