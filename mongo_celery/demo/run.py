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
from mongo_celery.demo.faults import FROZEN_NUMBER, Faults
from mongo_celery.demo.progress import BridgeState, Progress, StateReader
from mongo_celery.demo.record import Record
from mongo_celery.demo.servers import Urls, check_redis, embedded_servers, open_client, remove_traces
from mongo_celery.demo.setting import DemoSetting
from mongo_celery.demo.verdict import Judgement
from mongo_celery.demo.view import DemoView
from mongo_celery.embedded.crew import ChildProcess, Supervisor
from mongo_celery.errors import MongoCeleryError
from mongo_celery.mongo.oplog import operation_time

_APP = "mongo_celery.demo.app"
_RECORD = "written.jsonl"
_LOOK_SECONDS = 0.05
_READY_SECONDS_MAX = 60.0
_STALL_SECONDS_MAX = 100.0  # more than the 60 s for which a given server keeps a killed transaction
_CALM_SECONDS, _CALM_COMMITS = 2.0, 100  # after both the rate without faults is known well enough
_LOAD_SECONDS = 12.0
_FIRST_COMMITS = 30


class DemoFailedError(MongoCeleryError):
    """The demo did not get to its end. The message says what is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
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
    verdict: Judgement
    unfinished: str | None
    setting: DemoSetting
    kept: Path | None

    @property
    def good(self) -> bool:
        """Whether everything was written, committed and found, in order."""
        return self.unfinished is None and self.verdict.good

    def figures(self) -> dict[str, object]:
        """The figures, as `--json` names them."""
        rate, takeover = self.progress.changes_per_second, self.progress.takeover_seconds
        return {
            "written": self.progress.written,
            "committed": self.progress.committed,
            "changes_per_second": None if rate is None else round(rate, 1),
            "lost": len(self.verdict.lost),
            "out_of_order": len(self.verdict.out_of_order),
            "duplicates": self.verdict.duplicates,
            "stale_writes_refused": self.verdict.stale_writes_refused,
            "takeover_seconds": None if takeover is None else round(takeover, 2),
            "seconds": round(self.progress.seconds, 2),
        }


def run_demo(options: DemoOptions, view: DemoView) -> Result:
    """
    Run the demo from start to end. Everything that it started has ended when it returns or raises.

    Raises:
        MongoCeleryError: servers are missing or wrong, or a process did not start.
    """
    started = time.monotonic()
    with ExitStack() as stack:
        directory = stack.enter_context(_directory(keep=options.keep))
        view.show(Progress("starting MongoDB and Redis" if options.urls is None else "connecting"))
        kept = directory if options.keep else None
        urls = options.urls or stack.enter_context(embedded_servers(options.orders, kept))
        client = stack.enter_context(open_client(urls.mongo))
        check_redis(urls.redis)
        setting = _setting(client, urls, options)
        if options.urls is not None and not options.keep:
            stack.callback(remove_traces, client, setting)
        processes = stack.enter_context(Supervisor(directory, ChildProcess, environment=setting.environment()))
        return _Run(options, view, started, setting, client, processes, directory).play()


@contextmanager
def _directory(*, keep: bool) -> Iterator[Path]:
    """The directory of a run: logs and the record; with `keep` the data too."""
    if keep:
        yield Path(tempfile.mkdtemp(prefix="mongo-celery-demo-"))
        return
    with tempfile.TemporaryDirectory(prefix="mongo-celery-demo-", ignore_cleanup_errors=True) as path:
        yield Path(path)


def _setting(client: MongoClient[dict[str, Any]], urls: Urls, options: DemoOptions) -> DemoSetting:
    start = operation_time(client)
    return DemoSetting(
        run=secrets.token_hex(4),
        mongo_url=urls.mongo,
        redis_url=urls.redis,
        start=(start.time, start.inc),
        freeze=f"{plan.first_order(options.orders)}:{FROZEN_NUMBER}" if options.faults else None,
    )


class _Run:
    """The part of a run in which processes live."""

    def __init__(
        self,
        options: DemoOptions,
        view: DemoView,
        started: float,
        setting: DemoSetting,
        client: MongoClient[dict[str, Any]],
        processes: Supervisor[ChildProcess],
        directory: Path,
    ) -> None:
        self._options = options
        self._view = view
        self._started = started
        self._setting = setting
        self._database: Database[dict[str, Any]] = client[setting.database]
        self._state = StateReader(client, setting)
        self._processes = processes
        self._directory = directory
        self._record = Record(directory / _RECORD)
        self._calm = plan.total(options.orders, plan.PARTS[:1])
        self._idle_until = started
        self._rate: float | None = None
        self._faults: Faults | None = None
        self._events: list[str] = []
        self._latest = BridgeState(None, {})
        self._progress = Progress("starting listeners and worker", total=plan.total(options.orders))

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
        verdict = judging.judge(self._record.writes, read_evidence(self._database, self._setting))
        self._show("done")
        kept = self._directory if self._options.keep else None
        return Result(progress=self._progress, verdict=verdict, unfinished=unfinished, setting=self._setting, kept=kept)

    def _start(self) -> None:
        self._database["orders"].create_index("customer")
        self._show("starting listeners and worker")
        self._listeners = [self._processes.celery(_APP, "listener", "-l", "INFO") for _ in range(2)]
        self._worker = self._processes.celery(
            _APP,
            *("worker", "-c", "2", "-P", "prefork", "-l", "WARNING"),
            *("--without-gossip", "--without-mingle", "--without-heartbeat"),
        )
        self._wait(lambda: self._latest.holder is not None, _READY_SECONDS_MAX, "a listener that holds the lease")

    def _work(self) -> None:
        """First without faults, as fast as it goes; then over some seconds, so that there is time for faults."""
        calm, rest = plan.PARTS
        self._show("writing and handling, nothing is broken yet")
        self._write(calm, 0.0)
        self._wait(lambda: self._rate is not None, _STALL_SECONDS_MAX, "the first commits")
        if self._options.faults:
            left = self._progress.total - self._progress.committed
            self._faults = Faults(
                self._database,
                self._listeners,
                self._worker,
                first_commits=self._progress.committed + min(_FIRST_COMMITS, left // 3),
                frozen_order=plan.first_order(self._options.orders),
            )
            self._show("writing, handling, and breaking things")
            self._write(rest, _LOAD_SECONDS)
        else:
            self._show("writing and handling the rest")
            self._write(rest, 0.0)
        self._wait(lambda: not self._open_points(), _STALL_SECONDS_MAX, None)

    def _write(self, part: str, seconds: float) -> None:
        arguments = (str(self._options.orders), part, str(seconds), str(self._directory / _RECORD))
        self._processes.python("writer", "-m", "mongo_celery.demo.writer", *arguments)

    def _open_points(self) -> list[str]:
        """What the end is waiting for."""
        points = []
        if len(self._record.writes) < self._progress.total:
            points.append(f"the writer has written {len(self._record.writes)} of {self._progress.total}")
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
        self._note_rate()
        if self._faults is not None:
            self._faults.step(self._latest)
        self._show(self._progress.phase)

    def _note_rate(self) -> None:
        """Changes a second from the last look before the first commit on, as soon as it can be said."""
        if self._rate is not None:
            return
        committed, now = self._latest.done(self._record), time.monotonic()
        seconds = now - self._idle_until
        if committed == 0:
            self._idle_until = now
        elif committed >= self._calm or (committed >= _CALM_COMMITS and seconds >= _CALM_SECONDS):
            self._rate = committed / seconds
            self._events.append(f"{self._rate:.0f} changes a second without faults ({committed} in {seconds:.1f} s)")

    def _show(self, phase: str) -> None:
        faults = self._faults
        self._progress = replace(
            self._progress,
            phase=phase,
            seconds=time.monotonic() - self._started,
            written=len(self._record.writes),
            committed=self._latest.done(self._record),
            holder=self._latest.holder,
            version=self._latest.version,
            changes_per_second=self._rate,
            takeover_seconds=faults.takeover_seconds if faults else None,
            events=(*self._events, *(faults.events if faults else ())),
        )
        self._view.show(self._progress)
