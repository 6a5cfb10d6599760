"""The runner delivers a bridge's changes in the test's process, until nothing is left to do."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self
from uuid import uuid4

from bson import Timestamp, json_util
from celery.signals import task_failure
from pymongo import MongoClient
from pymongo.database import Database

from mongo_celery.arguments import nearest
from mongo_celery.bridge.existing import SNAPSHOT
from mongo_celery.bridge.handlers import Handler
from mongo_celery.bridge.options import BridgeOptions
from mongo_celery.bridge.wiring import Wiring
from mongo_celery.errors import ConfigurationError, HandlerUsageError
from mongo_celery.mongo.oplog import operation_time
from mongo_celery.testing.calls import (
    CRASH_POINTS,
    CallRecorder,
    CrashPoint,
    HandlerCall,
    PlannedCrash,
    ProcessKilledError,
    handlers_part,
)
from mongo_celery.testing.messages import MemoryBroker, SentTask, run_message
from mongo_celery.testing.term import SteppedTerm, await_ends

if TYPE_CHECKING:
    from mongo_celery import Bridge

__tracebackhide__ = True  # for pytest: show the line of the test or the handler
_PAUSE_SECONDS = 0.005
_STILL_SECONDS = 60.0
_SENT_SECONDS = 5.0
_SHOWN = 10
_TURN = threading.Lock()
"""The running runner of this process holds it, because queues and connections belong to the process."""


@dataclass(frozen=True, slots=True)
class DeliveredChanges:
    """
    The result of one `deliver`.

    ::

        with BridgeRunner(bridge, url=url) as runner:
            orders.insert_one({"_id": 2, "total": 20})
            delivered: DeliveredChanges = runner.deliver(duplicates=True)
        assert len(delivered.of("summarise")) == 1
        assert not delivered.failures

    Attributes:
        calls: calls of handlers, in the order of their ends.
        standing: the blocked partitions that need action, with their errors.
        handlers: names of all handlers of the bridges.
    """

    calls: tuple[HandlerCall, ...]
    standing: tuple[str, ...] = ()
    handlers: tuple[str, ...] = field(default=(), repr=False)

    def of(self, handler: str) -> tuple[HandlerCall, ...]:
        """
        Return the calls of one handler.

        Raises:
            HandlerUsageError: the handler does not exist.
        """
        _check_handler(handler, self.handlers)
        return tuple(call for call in self.calls if call.handler == handler)

    @property
    def retries(self) -> tuple[HandlerCall, ...]:
        """Calls that ended with a retry."""
        return tuple(call for call in self.calls if call.is_retry)

    @property
    def failures(self) -> tuple[HandlerCall, ...]:
        """Calls that failed, if no later call handled their change."""
        return tuple(
            call
            for number, call in enumerate(self.calls)
            if call.has_failed and not any(_repeats(later, call) for later in self.calls[number + 1 :])
        )


def _check_handler(name: str | None, known: Sequence[str]) -> str | None:
    if name is not None and name not in known:
        raise HandlerUsageError(f"No bridge of the runner has a handler {name!r}{nearest(name, known)}.")
    return name


def _drop(database: Database[Any]) -> None:
    """Drop each collection. Dropping the database takes a tenth of a second per test."""
    for name in database.list_collection_names():
        database.drop_collection(name)


def _repeats(later: HandlerCall, call: HandlerCall) -> bool:
    """Return True if a later call has handled the changes of an earlier one."""
    places = {(change.partition, change.seq) for change in later.changes}
    return (
        later.is_done
        and later.handler == call.handler
        and all((change.partition, change.seq) in places for change in call.changes)
    )


class BridgeRunner:
    """
    Delivers the changes of bridges in this process and thread, with the code of listener and worker.

    ::

        with BridgeRunner(bridge, url=url) as runner:
            orders.insert_one({"_id": 1, "total": 20})
            runner.deliver()
        assert summaries.find_one({"_id": 1})["total"] == 20

    Use it as a context manager. `deliver` delivers changes that were written inside. It delivers earlier changes only
    if a handler begins with a snapshot. The state is in a temporary database, which is removed at the end. Messages are
    in a broker in memory. The runner has no processes, so it has no pools, time limits, prefetch or broker faults, and
    it never runs two handlers at the same time, and a `rate` takes no time. Use one runner at a time in a process.

    Args:
        bridges: the bridges to run, of one app or several.
        url: URL of the MongoDB replica set. By default the bridge's.

    Raises:
        ConfigurationError: no bridge was given, or one has no handlers.
    """

    def __init__(self, *bridges: Bridge, url: str | None = None) -> None:
        if not bridges:
            raise ConfigurationError("BridgeRunner needs a bridge, such as BridgeRunner(bridge, url=mongo_celery_url).")
        self._wirings = [bridge.wiring for bridge in bridges]
        self._url = url
        self._terms: list[SteppedTerm] = []
        self._broker = MemoryBroker()
        self._recorder = CallRecorder(self._run_until_idle)
        self._known: set[str] = set()
        self._began = self._limit = 0
        self._options = {"retries": True, "duplicates": False}
        self._stack, self._leading = contextlib.ExitStack(), contextlib.ExitStack()

    def __enter__(self) -> Self:
        if not _TURN.acquire(blocking=False):
            raise HandlerUsageError(
                "A BridgeRunner is already open in this process. Pass both bridges to it, or close it first."
            )
        with contextlib.ExitStack() as stack:
            stack.callback(_TURN.release)
            stack.callback(self._terms.clear)
            stack.enter_context(self._broker.serving({id(each.app): each.app for each in self._wirings}.values()))
            for wiring in self._wirings:
                self._place(wiring, stack)
            stack.callback(await_ends, set(threading.enumerate()))
            stack.enter_context(self._leading)
            for wiring in self._wirings:
                self._terms.append(SteppedTerm(wiring))
                self._leading.enter_context(self._terms[-1].led())
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        awaited = self._recorder.awaited
        self._recorder.forget()
        self._stack.close()
        if awaited is not None and kind is None:
            raise AssertionError(f"No execution {awaited}, because deliver() was not called after you requested it.")

    def _place(self, wiring: Wiring, stack: contextlib.ExitStack) -> None:
        """Make a bridge use the test's MongoDB, and record its handlers' calls."""
        wiring.app.loader.import_default_modules()  # like workers, whatever modules the test imports
        wiring.app.finalize(auto=True)
        if not wiring.handlers:
            raise ConfigurationError(
                f"Bridge {wiring.name} has no handlers. Import the module with the @bridge.on_change functions, "
                "for example with include=[...] of the Celery app.",
            )
        url, state = place_url(self._url, wiring), f"mongo_celery_test_{uuid4().hex[:12]}"
        with MongoClient[dict[str, Any]](url) as client:
            now = operation_time(client)
        start_from = Timestamp(now.time, now.inc + 1)
        stack.enter_context(wiring.elsewhere(url, _begin_here(wiring.options), database=state, start_from=start_from))
        stack.callback(_drop, wiring.client[state])
        stack.enter_context(self._recorder.watching(wiring))

    @property
    def calls(self) -> Sequence[HandlerCall]:
        """All calls of handlers since the start."""
        return tuple(self._recorder.calls)

    # -- faults and snapshots ------------------------------------------------------------------------

    def crash(self, at: CrashPoint = "called", handler: str | None = None, *, times: int = 1, after: int = 0) -> None:
        """
        Let the next executions crash as after SIGKILL: they write nothing more, and their claims lapse.

        Args:
            at: `"claimed"`: before the handler is called. `"called"`: after the handler has returned, before anything
                is recorded (with `transactional=True` its transaction is committed). `"handled"`: after its success is
                recorded, before the commit message is sent. With `commit="inline"` there is no such message.
            handler: name of the handler. By default any.
            times: number of executions that crash, one after the other.
            after: number of executions that pass the point before the first crash.

        Raises:
            HandlerUsageError: the point or the handler does not exist.
        """
        if at not in CRASH_POINTS:
            raise HandlerUsageError(f"crash({at!r}) is unknown. Choose one of {', '.join(map(repr, CRASH_POINTS))}.")
        name = _check_handler(handler, self._handlers)
        self._recorder.crashes += [PlannedCrash(at, name, 0 if number else after) for number in range(times)]

    def stall(self, handler: str | None = None) -> None:
        """
        Let the next execution hang under its claim until all other work, including its change, is done.

        It then continues as a stale execution, with its change and fencing token.

        Args:
            handler: name of the handler. By default any.

        Raises:
            HandlerUsageError: there is no such handler.
        """
        self._recorder.stalls.append(_check_handler(handler, self._handlers))

    @property
    def _handlers(self) -> tuple[str, ...]:
        return tuple(sorted({handler.name for wiring in self._wirings for handler in wiring.handlers}))

    def snapshot(self, handler: str, *, sources: Sequence[str] = (), match: Mapping[str, Any] | None = None) -> None:
        """
        Start a snapshot for a handler, like `changes snapshot start`. The next `deliver` delivers its rows.

        Each document comes once, with the operation type `snapshot`, under a claim at its place between the changes. So
        its fence is the same as in production.

        Args:
            handler: name of the handler.
            sources: `"db.collection"` of the handler's collections. By default all of them.
            match: deliver only documents whose event fulfils this expression, like a handler's `match=`.

        Raises:
            HandlerUsageError: there is no such handler.
            CommandRefusedError: the handler takes no documents, does not watch a source, or `match` is not valid.
        """
        _check_handler(handler, self._handlers)
        text = None if match is None else json_util.dumps(match)
        for wiring, term in zip(self._wirings, self._terms, strict=True):
            if handler in {each.name for each in wiring.handlers}:
                term.ask(handler, sources, text)

    # -- delivery ------------------------------------------------------------------------------------

    def deliver(
        self, *, retries: bool = True, duplicates: bool = False, raises: bool = True, limit: int = 1000
    ) -> DeliveredChanges:
        """
        Deliver all changes, including those that handlers write meanwhile, until all work is done.

        It waits for no `delay` of a handler: when nothing else is left to do, delayed changes are due. With
        `coalesce=True` their keys then count as quiet.

        Args:
            retries: True to run changes that wait for a retry immediately. With False they wait.
            duplicates: run each message twice, like a broker that delivers it again.
            raises: raise the error of a handler that fails permanently, after its retries.
            limit: largest number of handler calls.

        Raises:
            AssertionError: there are more calls than `limit`, a partition is blocked, a change waits for an unavailable
                server, or a requested `crash` or `stall` did not happen.
            Exception: the first failed handler's error.
        """
        began, self._began = len(self.calls), len(self.calls)
        self._limit = limit
        self._options = {"retries": retries, "duplicates": duplicates}
        self._run_until_idle()
        standing = [each for term in self._terms for each in term.list_blocked()]
        delivered = DeliveredChanges(tuple(self._recorder.calls[began:]), tuple(standing), self._handlers)
        self._demand_faults()
        new, self._known = set(standing) - self._known, set(standing)
        if raises:
            _raise_failures(delivered, sorted(new))
        return delivered

    def sent(self, name: str | None = None) -> list[SentTask]:
        """Return the sent tasks that no worker has taken yet, or those of one name. The bridges' tasks are left out."""
        found = [SentTask.of(queue, message) for queue in self._task_queues() for message in self._broker.look(queue)]
        return [each for each in found if name is None or each.name == name]

    def _task_queues(self) -> list[str]:
        """Return the queues with messages, without those of the bridges."""
        own = {queue for term in self._terms for queue in term.queues}
        return [queue for queue in self._broker.queues() if queue not in own]

    def assert_enqueued(
        self,
        name: str,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        times: int = 1,
    ) -> None:
        """
        Assert how often a task was sent by `delay` or an outbox and not yet taken.

        It waits some seconds, because a thread of the outbox sends tasks.

        Args:
            name: name of the task.
            args: the arguments that a worker would pass. By default any.
            kwargs: the keyword arguments that a worker would pass. By default any.
            times: the expected number. 0 for none, which is checked without waiting.

        Raises:
            AssertionError: the number differs. The message lists the sent tasks.
        """
        until = time.monotonic() + _SENT_SECONDS
        while (count := sum(each.fits(name, args, kwargs) for each in self.sent())) < times:
            if time.monotonic() > until:
                break
            time.sleep(_PAUSE_SECONDS)
        if count != times:
            others = ", ".join(map(str, self.sent()[:_SHOWN])) or "nothing"
            raise AssertionError(f"{name} was sent {count} times, not {times}. Sent messages: {others}.")

    def run_tasks(self, *, duplicates: bool = False, limit: int = 1000) -> list[SentTask]:
        """
        Run sent tasks, and those that they send, in this process. Retries run immediately.

        Args:
            duplicates: run each message twice, like a broker that delivers it again.
            limit: largest number of messages.

        Returns:
            The tasks that ran, once for each message.

        Raises:
            AssertionError: there are more messages than `limit`.
            Exception: the first failed task's error.
        """
        apps, taken = [wiring.app for wiring in self._wirings], list[SentTask]()
        with collect_failures() as errors:
            while queues := self._task_queues():
                message = self._broker.take(queues[0])
                taken.append(SentTask.of(queues[0], message))
                if len(taken) > limit:
                    raise AssertionError(
                        f"More than {limit} tasks were sent, the last of them {taken[-1]}. Check that no task sends "
                        "itself again and again."
                    )
                app = next((each for each in apps if taken[-1].name in each.tasks), apps[0])
                for _ in range(1 + duplicates):
                    run_message(app, message)
        if errors:
            raise errors[0]
        return taken

    def _run_until_idle(self) -> None:
        """Run messages and turns of the listeners until no work is left."""
        moved_at, aims = time.monotonic(), True
        while True:
            if self._run_messages():
                moved_at, aims = time.monotonic(), True
                for term in self._terms:
                    term.look()
                continue
            if aims:
                aims = False
                for term in self._terms:
                    term.aim()
            if not self._has_moved():
                return
            if time.monotonic() - moved_at > _STILL_SECONDS:
                raise AssertionError(
                    f"No change has made progress for {_STILL_SECONDS:.0f} s, but some are not handled. See the log of "
                    "mongo_celery.",
                )

    def _has_moved(self) -> bool:
        """Let the listeners work when there is no message. Return False if nothing is left to do."""
        for term in self._terms:
            term.turn()
        if self._has_messages():
            return True
        busy = [term for term in self._terms if term.is_busy()]
        for term in busy:
            term.make_up()
            term.look()
        if busy:
            return True
        has_read_all = all(term.has_read_all() for term in self._terms)
        if (has_read_all or any(term.reads_snapshot() for term in self._terms)) and self._end_waits():
            return True
        if has_read_all and not any(term.has_snapshots() for term in self._terms):
            return False
        time.sleep(_PAUSE_SECONDS)  # the reader's thread is still reading
        return True

    def _end_waits(self) -> bool:
        """End delays, and if requested the waits for retries. Return True if there were any."""
        delays = [term.end_delays() for term in self._terms]
        waiting = [term for term in self._terms if term.waits()] if self._options["retries"] else []
        for term in waiting:
            term.end_waits()
            term.look()
        return any(delays) or bool(waiting)

    def _has_messages(self) -> bool:
        queues = set(self._broker.queues())
        return any(not queues.isdisjoint(term.queues) for term in self._terms)

    def _run_messages(self) -> bool:
        """Run the messages in the queues of the bridges. Return True if there were any."""
        has_run = False
        for wiring in self._wirings:
            for queue in wiring.queue_names:
                while (message := self._broker.take(queue)) is not None:
                    has_run = True
                    for _ in range(1 + self._options["duplicates"]):
                        with contextlib.suppress(ProcessKilledError):
                            run_message(wiring.app, message)
                    self._demand_end()
        return has_run

    def _demand_end(self) -> None:
        count = len(self._recorder.calls) - self._began
        if count > self._limit:
            raise AssertionError(
                f"Handlers were called more than {self._limit} times, the last time by "
                f"{self._recorder.calls[-1]!r}. Check that no handler writes to its own source or retries "
                "forever.",
            )

    def _demand_faults(self) -> None:
        awaited = self._recorder.awaited
        self._recorder.forget()
        if awaited is not None:
            raise AssertionError(
                f"No execution {awaited}. Check that the test has written a change for which a handler is called."
            )


def place_url(url: str | None, wiring: Wiring) -> str:
    """Return the given URL with the bridge's database, or by default the bridge's own URL."""
    if url is None:
        return wiring.url
    try:
        database = wiring.default_database
    except ConfigurationError:  # it has no URL
        return url
    scheme, _, rest = url.partition("://")
    hosts, slash, more = rest.partition("/")
    if not database or (slash and more.partition("?")[0]):
        return url
    return f"{scheme}://{hosts}/{database}{more or ''}"


def _begin_here(own: BridgeOptions) -> Callable[[BridgeOptions, Handler], Handler]:
    """Start handlers with the runner, with a snapshot if the bridge's options request one."""

    def change(_options: BridgeOptions, handler: Handler) -> Handler:
        return replace(handler, start_from=SNAPSHOT if handler.begins_with_snapshot(own) else None)

    return change


def _raise_failures(delivered: DeliveredChanges, standing: Sequence[str]) -> None:
    for call in delivered.failures:
        assert call.error is not None, "a failure has an error"
        blocked = "; ".join(standing) or "no partition"
        call.error.add_note(f"In {call!r}. Blocked: {blocked.rstrip('.')}.")
        raise handlers_part(call.error)
    if standing:
        raise AssertionError("; ".join(standing))


@contextlib.contextmanager
def collect_failures() -> Iterator[list[BaseException]]:
    """Collect the errors of tasks that fail in the block."""
    errors: list[BaseException] = []

    def note(exception: BaseException, **_more: Any) -> None:
        errors.append(exception)

    task_failure.connect(note, weak=False)
    try:
        yield errors
    finally:
        task_failure.disconnect(note)
