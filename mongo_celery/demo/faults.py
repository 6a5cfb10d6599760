"""
The faults of a run, in order, while load runs:

1. The leading listener is killed by SIGKILL. The time until the other one has raised the lease's version is the
   take-over time.
2. A process of the worker's pool is killed by SIGKILL, most likely within a handler.
3. A handler freezes just before its write (`app.freeze_once`). It is woken when another execution has done its
   work and that of the next change, and must find its write refused.

The script is a generator: each `yield` waits for the next look at the run.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pymongo.database import Database

from mongo_celery.demo.plan import UPDATES
from mongo_celery.demo.progress import BridgeState
from mongo_celery.embedded.crew import ChildProcess

FROZEN_NUMBER = UPDATES // 2
_REFUSAL_SECONDS_MAX = 10.0


class Faults:
    """
    The faults of one run. Call `step` with each look at the run.

    Args:
        database: the run's data.
        listeners: both of them.
        worker: whose pool is hit.
        first_commits: how many changes are handled before the first fault.
        frozen_order: in whose handler one process freezes.

    Attributes:
        events: what was done, a sentence each.
        takeover_seconds: None until the take-over has been seen.
        waiting_for: what the next step needs; None when all is done.
    """

    def __init__(
        self,
        database: Database[dict[str, Any]],
        listeners: Sequence[ChildProcess],
        worker: ChildProcess,
        *,
        first_commits: int,
        frozen_order: str,
    ) -> None:
        self._database = database
        self._listeners = listeners
        self._worker = worker
        self._first_commits = first_commits
        self._frozen_order = frozen_order
        self._state = BridgeState(None, {})
        self._killed: int | None = None
        self._script: Iterator[None] = self._play()
        self.events: list[str] = []
        self.takeover_seconds: float | None = None
        self.waiting_for: str | None = "the first commits"

    def step(self, state: BridgeState) -> None:
        """Go on with the script as far as it goes now."""
        self._state = state
        if self.waiting_for is not None and next(self._script, self) is self:
            self.waiting_for = None

    def _play(self) -> Iterator[None]:
        yield from self._until(self._under_load, "the first commits")
        yield from self._kill_leader()
        before = self._commits()
        yield from self._until(lambda: self._commits() > before, "a commit after the take-over")
        yield from self._until(self._kill_pool_process, "a process of the worker's pool")
        yield from self._wake_frozen_handler()

    def _until(self, condition: Callable[[], Any], text: str) -> Iterator[None]:
        self.waiting_for = text
        while not condition():
            yield

    def _commits(self) -> int:
        return sum(self._state.committed.values())

    def _under_load(self) -> bool:
        return self._commits() >= self._first_commits and self._state.holder is not None

    def _kill_leader(self) -> Iterator[None]:
        leader = next((each for each in self._listeners if each.pid == self._state.holder), None)
        assert leader is not None, "the lease names one of our listeners"
        version = self._state.version
        killed_at = time.monotonic()
        leader.kill()
        self.events.append(f"killed the leading listener (pid {leader.pid}) with SIGKILL")
        yield from self._until(lambda: self._state.version > version, "the take-over")
        self.takeover_seconds = time.monotonic() - killed_at
        self.events.append(f"pid {self._state.holder} took over after {self.takeover_seconds:.1f} s")

    def _kill_pool_process(self) -> bool:
        """Kill the process that was last seen to start a handler, unless it is the frozen one."""
        frozen = self._database["frozen"].find_one()
        others = {"pid": {"$ne": frozen["pid"] if frozen else None, "$exists": True}}
        latest = self._database["journal"].find_one(others, {"pid": 1}, sort=[("_id", -1)])
        if latest is None or not self._worker.leads(latest["pid"]):
            return False
        os.kill(latest["pid"], signal.SIGKILL)
        self._killed = latest["pid"]
        self.events.append(f"killed a process of the worker's pool (pid {latest['pid']}) with SIGKILL")
        return True

    def _frozen_handler(self) -> dict[str, Any] | None:
        """The handler that has frozen. If it was killed meanwhile, the next execution shall freeze instead."""
        frozen = self._database["frozen"]
        frozen.delete_one({"pid": self._killed})
        return frozen.find_one()

    def _wake_frozen_handler(self) -> Iterator[None]:
        yield from self._until(self._frozen_handler, "the handler that freezes")
        victim = self._frozen_handler() or {}
        self.events.append(f"a handler froze just before its write (pid {victim['pid']})")
        overtaken = {"_id": self._frozen_order, "n": {"$gt": FROZEN_NUMBER}}  # so that an accepted write would go back
        summaries = self._database["summaries"]
        yield from self._until(lambda: summaries.find_one(overtaken), "the executions that take the frozen one's place")
        if not self._worker.leads(victim["pid"]):
            self.events.append("the frozen handler's process is gone")
            return
        os.kill(victim["pid"], signal.SIGCONT)
        self.events.append("newer executions did its work and more; woke the frozen handler")
        refusals, deadline = self._database["refusals"], time.monotonic() + _REFUSAL_SECONDS_MAX
        yield from self._until(
            lambda: refusals.find_one() or time.monotonic() > deadline, "the refusal of the frozen handler's write"
        )
        refused = refusals.find_one() is not None
        self.events.append(f"its write was {'refused: stale fencing token' if refused else 'NOT refused'}")
