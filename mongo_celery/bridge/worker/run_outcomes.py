"""
The outcomes of a run of several changes: its position may move while the claim stands.

What is done, with more of the run behind it, is recorded now and then, and before a change that fails: number and token
move under the fence of this execution, and the claim goes on with the next change as its first one, of which nothing is
counted yet. So what is finished is not repeated, whatever becomes of the rest, and all other outcomes are those of a
first change, as ever.

A quick run of which nothing failed moves no position here: it is marked as handled, and its commit follows as for a run
of one change.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from celery.exceptions import Ignore, SoftTimeLimitExceeded
from pymongo.errors import PyMongoError

from mongo_celery.bridge.change import token_data
from mongo_celery.bridge.error_text import error_text
from mongo_celery.bridge.existing import is_existing
from mongo_celery.bridge.worker.outcomes import Outcomes, persisted
from mongo_celery.mongo.verdicts import is_transient

if TYPE_CHECKING:
    from pymongo.client_session import ClientSession

    from mongo_celery.bridge.state.claims import Claim
    from mongo_celery.bridge.worker.envelope import Run

logger = logging.getLogger("mongo_celery.worker")

_NAMED_MAX = 20


class RunOutcomes(Outcomes):
    """What becomes of a run of changes; arguments as of `Outcomes`."""

    @property
    def claim(self) -> Claim:
        """As it stands: its first change is the first one that is not recorded."""
        return self._claim

    @property
    def run(self) -> Run:
        """What is left of the run."""
        return self._run

    @property
    def is_lost(self) -> bool:
        """Whether the claim belongs to somebody else."""
        return self._beat.lost

    def begin(self, run: Run) -> None:
        """The run with its changes, which may have travelled by reference."""
        self._run = run

    def advance(self, count: int, passed_over: Sequence[bytes] = ()) -> None:
        """
        Record that so many changes are done, and go on with the next one as the claim's first.

        Args:
            count: of changes, from the claim's first on.
            passed_over: events among them that were not given, since the next one stands for them.

        Raises:
            Ignore: a newer execution decides; or MongoDB does not answer, and the process records it later.
        """
        claim, started = self._claim, time.monotonic()
        tokens = [token_data(self._run.token_of(raw)) for raw in passed_over]
        named = {"count": len(tokens), "tokens": tokens[-_NAMED_MAX:]} if tokens else None
        write = partial(self._claims.advance, claim, *self._reached(count), passed_over=named, of=self._of(count))
        self._beats.end(self._beat)  # it asks for a claim whose first change is the one before
        try:
            accepted = persisted(write, f"what is done of {claim.partition_id}", self._patience)
        except Exception as error:
            if isinstance(error, SoftTimeLimitExceeded) or is_transient(error):
                self._defer("progress", lambda: write() and self._relinquish(), error)
            raise
        if not accepted:
            self._beats.end(self._beat)  # again: it may have lapsed while this was waited for, which is nobody's crash
            self._refused("progress")
        self.follow(count, started, named)

    def advance_in(self, session: ClientSession, count: int, *, ends: bool) -> bool:
        """The same inside a transaction, or with `ends` as `passed`; `follow` when it has committed."""
        reached, of = self._reached(count), self._of(count)
        return self._claims.advance(self._claim, *reached, of=of, ends=ends, session=session)

    def handle_in(self, session: ClientSession, count: int) -> bool:
        """Inside a transaction: all of the run is done, and its commit follows."""
        return self._claims.handle(self._claim, *self._reached(count), session)

    def follow(self, count: int, started: float, passed_over: Mapping[str, Any] | None = None) -> None:
        """So many changes are recorded, by a write that began at this monotonic time; the rest as of a claim."""
        run, claim = self._run, self._claim
        self._beats.end(self._beat)
        self._claim = replace(
            claim,
            first=claim.first + count,
            retries=0,
            crashes=0,
            waits=0,
            doubts=0,
            passed_over=passed_over,
        )
        self._run = replace(
            run,
            first=run.first + count,
            changes=run.changes[count:],
            hash=run.hash_at(count),
            hashes=run.hashes[count:],
        )
        renew = not self._handler.transactional
        self._beat = self._beats.begin(self._claim, started, ttl=self._beat.ttl, renew=renew)

    def passed(self, count: int) -> None:
        """The last of the run is done, and some of it was recorded before: the execution moves the position itself."""
        last, token = self._reached(count)
        self._settle({"progress": lambda: self._claims.advance(self._claim, last, token, ends=True)})

    def released(self) -> None:
        """The run ends here, with all that is done recorded; the rest is sent again."""
        self._settle({"release": self._relinquish})

    def single_out(self, error: Exception) -> NoReturn:
        """What is left of the run is sent one by one, each with the whole time that its handler has; always raises."""
        logger.warning(
            "the rest of a run of %s is sent one by one: %s",
            self._claim.partition_id,
            error_text(error),
            extra={"event": "list_ended", "partition": self._claim.partition_id},
        )
        self._settle({"release": lambda: self._claims.single_out(self._claim)})
        raise Ignore from error

    def renew(self) -> None:
        """
        Between two transactions: a claim that is not renewed inside of one has to outlast the next.

        Raises:
            Ignore: a newer execution decides, or MongoDB does not answer.
        """
        claim, started = self._claim, time.monotonic()
        try:
            lost = persisted(lambda: bool(self._claims.extend([claim])), claim.partition_id, self._patience)
        except (PyMongoError, SoftTimeLimitExceeded) as error:
            self._defer("release", self._relinquish, error)
        if lost:
            self._refused("renewal")
        self._beat.renewed = started

    def crashed(self, error: BaseException, done: int = 0, *, is_counted: bool) -> None:
        """As the original, for the first change that is not done; so many of those that are were not recorded yet."""
        if done:
            self._beats.end(self._beat)  # it asks for a claim whose first change is the one before
            try:
                recorded = self._claims.advance(self._claim, *self._reached(done), of=self._of(done))
            except PyMongoError:
                recorded = False
            if not recorded:
                logger.warning(
                    "could not record the crash of %s; its claim will lapse",
                    self._claim.partition_id,
                    extra={"event": "crash_not_recorded"},
                )
                return
            self.follow(done, time.monotonic())
        super().crashed(error, is_counted=is_counted)

    def _relinquish(self) -> bool:
        return self._claims.relinquish(self._claim.partition_id, self._claim.owner)

    def _of(self, count: int) -> str | None:
        """By which the change behind so many is known, where what is counted of it is its own."""
        if count >= len(self._run.changes):
            return None
        token = token_data(self._run.token_of(self._run.changes[count]))
        return token if is_existing(token) else None

    def _reached(self, count: int) -> tuple[int, dict[str, object]]:
        """Number and token of the last of so many changes."""
        token = self._run.token_of(self._run.changes[count - 1])
        return self._claim.first + count - 1, dict(token)

    def leave(self) -> None:
        """End the claim, if it stands. What was refused may be its own doing, of which the answer was lost."""
        try:
            self._relinquish()
        except PyMongoError:
            logger.debug("could not end the claim of %s", self._claim.partition_id)

    def _refused(self, outcome: str) -> NoReturn:
        self.leave()
        super()._refused(outcome)
