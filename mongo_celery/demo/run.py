"""One run of the demo: servers, processes, load, faults, and the verdict."""

from __future__ import annotations

import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pymongo import MongoClient
from pymongo.database import Database

from mongo_celery.demo import plan
from mongo_celery.demo import verdict as judging
from mongo_celery.demo.evidence import read_evidence
from mongo_celery.demo.faults import FROZEN_NUMBER, FROZEN_ORDER, Faults
from mongo_celery.demo.progress import Progress, State, StateReader
from mongo_celery.demo.record import Record
from mongo_celery.demo.servers import Urls, check_redis, embedded_servers, open_client, remove_traces
from mongo_celery.demo.setting import Setting
from mongo_celery.demo.verdict import Verdict
from mongo_celery.demo.view import View
from mongo_celery.embedded.crew import ChildProcess, Supervisor
from mongo_celery.errors import MongoCeleryError
from mongo_celery.mongo.oplog import operation_time

_APP = "mongo_celery.demo.app"
_LOOK_SECONDS = 0.05
_READY_SECONDS_MAX = 60.0
_STALL_SECONDS_MAX = 100.0  # more than the 60 s for which a given server keeps a killed transaction
_LOAD_SECONDS = 12.0
_LOAD_SECONDS_WITHOUT_FAULTS = 4.0
_FIRST_COMMITS = 30


class DemoFailedError(MongoCeleryError):
    """The demo did not get to its end. The message says what is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What the user asked for; `urls` None means embedded servers."""

    orders: int
    faults: bool
    keep: bool
    urls: Urls | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """
    How a run ended.

    Attributes:
        verdict: also given when the run did not finish: then what is missing counts as lost.
        unfinished: why the run did not finish, or None.
        kept: where data and logs are, if they were kept.
    """

    progress: Progress
    verdict: Verdict
    unfinished: str | None
    setting: Setting
    kept: Path | None

    @property
    def good(self) -> bool:
        """Whether everything was written, committed and found, in order."""
        return self.unfinished is None and self.verdict.good

    def figures(self) -> dict[str, object]:
        """The figures, as `--json` names them."""
        takeover = self.progress.takeover_seconds
        return {
            "written": self.progress.written,
            "committed": self.progress.committed,
            "lost": len(self.verdict.lost),
            "out_of_order": len(self.verdict.out_of_order),
            "duplicates": self.verdict.duplicates,
            "stale_writes_refused": self.verdict.stale_writes_refused,
            "takeover_seconds": None if takeover is None else round(takeover, 2),
            "seconds": round(self.progress.seconds, 2),
        }


def run_demo(wishes: Wishes, view: View) -> Result:
    """
    Run the demo from start to end. Everything that it started has ended when it returns or raises.

    Raises:
        MongoCeleryError: servers are missing or wrong, or a process did not start.
    """
    started = time.monotonic()
    with ExitStack() as stack:
        ground = stack.enter_context(_ground(keep=wishes.keep))
        view.show(Progress("starting MongoDB and Redis" if wishes.urls is None else "connecting"))
        kept = ground if wishes.keep else None
        urls = wishes.urls or stack.enter_context(embedded_servers(wishes.orders, kept))
        client = stack.enter_context(open_client(urls.mongo))
        check_redis(urls.redis)
        setting = _setting(client, urls, wishes)
        if wishes.urls is not None and not wishes.keep:
            stack.callback(remove_traces, client, setting)
        processes = stack.enter_context(Supervisor(ground, ChildProcess, environment=setting.environment()))
        return _Run(wishes, view, started, setting, client, processes, ground).play()


@contextmanager
def _ground(*, keep: bool) -> Iterator[Path]:
    """The directory of a run: logs and the record; with `keep` the data too."""
    if keep:
        yield Path(tempfile.mkdtemp(prefix="mongo-celery-demo-"))
        return
    with tempfile.TemporaryDirectory(prefix="mongo-celery-demo-", ignore_cleanup_errors=True) as path:
        yield Path(path)


def _setting(client: MongoClient[dict[str, Any]], urls: Urls, wishes: Wishes) -> Setting:
    start = operation_time(client)
    return Setting(
        run=secrets.token_hex(4),
        mongo_url=urls.mongo,
        redis_url=urls.redis,
        start=(start.time, start.inc),
        freeze=f"{FROZEN_ORDER}:{FROZEN_NUMBER}" if wishes.faults else None,
    )


class _Run:
    """The part of a run in which processes live."""

    def __init__(
        self,
        wishes: Wishes,
        view: View,
        started: float,
        setting: Setting,
        client: MongoClient[dict[str, Any]],
        processes: Supervisor[ChildProcess],
        ground: Path,
    ) -> None:
        self._wishes = wishes
        self._view = view
        self._started = started
        self._setting = setting
        self._database: Database[dict[str, Any]] = client[setting.database]
        self._state = StateReader(client, setting)
        self._processes = processes
        self._ground = ground
        self._record = Record(ground / "written.jsonl")
        self._faults: Faults | None = None
        self._writer: ChildProcess | None = None
        self._latest = State(None, {})
        self._progress = Progress("starting listeners and worker", total=plan.total(wishes.orders))

    def play(self) -> Result:
        """Start the processes, wait until all is done, stop them, and judge."""
        self._start()
        unfinished = None
        try:
            self._work()
        except DemoFailedError as failure:
            unfinished = str(failure)
        self._show("stopping the processes")
        self._processes.end()
        self._look()  # once more: a commit may have been under way
        self._show("reading everything back")
        verdict = judging.judge(self._record.written(), read_evidence(self._database, self._setting))
        self._show("done")
        kept = self._ground if self._wishes.keep else None
        return Result(progress=self._progress, verdict=verdict, unfinished=unfinished, setting=self._setting, kept=kept)

    def _start(self) -> None:
        self._database["orders"].create_index("customer")
        self._show("starting listeners and worker")
        listeners = [self._processes.celery(_APP, "listener", "-l", "INFO") for _ in range(2)]
        worker = self._processes.celery(
            _APP,
            *("worker", "-c", "2", "-P", "prefork", "-l", "WARNING"),
            *("--without-gossip", "--without-mingle", "--without-heartbeat"),
        )
        self._wait(lambda: self._latest.holder is not None, _READY_SECONDS_MAX, "a listener that holds the lease")
        if self._wishes.faults:
            first = min(_FIRST_COMMITS, self._progress.total // 3)
            self._faults = Faults(self._database, listeners, worker, first)

    def _work(self) -> None:
        self._show("writing, handling" + (", and breaking things" if self._wishes.faults else ""))
        seconds = _LOAD_SECONDS if self._wishes.faults else _LOAD_SECONDS_WITHOUT_FAULTS
        self._writer = self._processes.python(
            "writer",
            *("-m", "mongo_celery.demo.writer", str(self._wishes.orders), str(seconds)),
            str(self._ground / "written.jsonl"),
        )
        self._wait(self._is_done, _STALL_SECONDS_MAX, None)

    def _is_done(self) -> bool:
        return not self._open_points()

    def _open_points(self) -> list[str]:
        """What the end is waiting for."""
        points = []
        if self._writer is None or self._writer.returncode != 0:
            points.append(f"the writer has written {self._record.count} of {self._progress.total}")
        for name, count in self._latest.missing(self._record).items():
            if count:
                points.append(f"{name} has {count} changes to commit")
        points += [
            f"partition {image.index} of {image.subscription} is {image.state}: {image.error or 'no error'}"
            for image in self._latest.standing
        ]
        if self._faults is not None and self._faults.waiting_for is not None:
            points.append(f"waiting for {self._faults.waiting_for}")
        return points

    def _wait(self, condition: Callable[[], bool], stall: float, what: str | None) -> None:
        """Look again and again; give up when nothing has moved for so many seconds."""
        pause = threading.Event()
        moved, moved_at = self._progress, time.monotonic()
        while True:
            self._look()
            if condition():
                return
            failed = self._processes.failed()
            if failed is not None:
                raise DemoFailedError(
                    f"{failed.name} ended with status {failed.returncode}. Its last words:\n{failed.last_words}",
                )
            if any(image.state == "halted" for image in self._latest.standing):
                raise DemoFailedError("; ".join(self._open_points()))
            now = replace(self._progress, seconds=moved.seconds)
            if now != moved:
                moved, moved_at = now, time.monotonic()
            if time.monotonic() - moved_at > stall:
                points = [what] if what else self._open_points()
                raise DemoFailedError(f"nothing has moved for {stall:.0f} s; missing: {'; '.join(points)}.")
            pause.wait(_LOOK_SECONDS)

    def _look(self) -> None:
        self._record.read()
        self._latest = self._state.read()
        if self._faults is not None:
            self._faults.step(self._latest)
        self._show(self._progress.phase)

    def _show(self, phase: str) -> None:
        faults = self._faults
        self._progress = replace(
            self._progress,
            phase=phase,
            seconds=time.monotonic() - self._started,
            written=self._record.count,
            committed=self._latest.done(self._record),
            holder=self._latest.holder,
            version=self._latest.version,
            takeover_seconds=faults.takeover_seconds if faults else None,
            events=tuple(faults.events) if faults else (),
        )
        self._view.show(self._progress)
