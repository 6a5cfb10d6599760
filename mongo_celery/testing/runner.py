"""The runner: a bridge whose changes are delivered in the process of a test, until nothing is left to do."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self
from uuid import uuid4

from bson import Timestamp, json_util
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
    CallRecorder,
    HandlerCall,
    PlannedCrash,
    ProcessKilledError,
    checked_point,
    handlers_part,
)
from mongo_celery.testing.messages import MemoryBroker, SentTask, run_message
from mongo_celery.testing.term import SteppedTerm, await_ends

__tracebackhide__ = True  # for pytest: what fails is the test's line, and the handler's
_PAUSE_SECONDS = 0.005
_STILL_SECONDS = 60.0
_SENT_SECONDS = 5.0
_SHOWN = 10


class Wired(Protocol):
    """A `Bridge`, as far as it is needed here."""

    @property
    def wiring(self) -> Wiring:
        """What its parts are handed."""


@dataclass(frozen=True, slots=True)
class DeliveredChanges:
    """
    What one `deliver` did.

    ::

        with BridgeRunner(bridge, url=url) as runner:
            orders.insert_one({"_id": 2, "total": 20})
            delivered: DeliveredChanges = runner.deliver(duplicates=True)
        assert len(delivered.of("summarise")) == 1
        assert not delivered.failures

    Attributes:
        calls: of handlers, in the order of their ends.
        standing: partitions that a person has to see to, each with its error.
        handlers: names of all handlers of the bridges.
    """

    calls: tuple[HandlerCall, ...]
    standing: tuple[str, ...] = ()
    handlers: tuple[str, ...] = field(default=(), repr=False)

    def of(self, handler: str) -> tuple[HandlerCall, ...]:
        """
        The calls of one handler.

        Raises:
            HandlerUsageError: there is no such handler.
        """
        _check_handler(handler, self.handlers)
        return tuple(call for call in self.calls if call.handler == handler)

    @property
    def retries(self) -> tuple[HandlerCall, ...]:
        """Calls that ended with a retry."""
        return tuple(call for call in self.calls if call.is_retry)

    @property
    def failures(self) -> tuple[HandlerCall, ...]:
        """Calls that failed, and whose change was not handled by a later one."""
        return tuple(
            call
            for number, call in enumerate(self.calls)
            if call.has_failed and not any(_repeats(later, call) for later in self.calls[number + 1 :])
        )


def _check_handler(name: str, known: Sequence[str]) -> None:
    if name not in known:
        raise HandlerUsageError(f"no bridge of the runner has a handler {name!r}{nearest(name, known)}.")


def _drop(database: Database[Any]) -> None:
    """Collection by collection: a database as a whole would take the server a tenth of a second, in each test."""
    for name in database.list_collection_names():
        database.drop_collection(name)


def _repeats(later: HandlerCall, call: HandlerCall) -> bool:
    """Whether a later call has done what this one was to do."""
    places = {(change.partition, change.seq) for change in later.changes}
    return (
        later.is_done
        and later.handler == call.handler
        and all((change.partition, change.seq) in places for change in call.changes)
    )


class BridgeRunner:
    """
    Delivers the changes of bridges in this process and thread, by the listener's and the worker's own code.

    ::

        with BridgeRunner(bridge, url=url) as runner:
            orders.insert_one({"_id": 1, "total": 20})
            runner.deliver()
        assert summaries.find_one({"_id": 1})["total"] == 20

    A context manager. What is written inside is delivered by `deliver`; what was written before is not, unless a
    handler begins with a snapshot. State lies in a database of its own that is removed at the end, and messages in a
    broker in memory, whatever the app's is. Not shown: processes, so neither pools nor limits of time, nor prefetch,
    nor the broker's own faults; nor two handlers at the same moment. One runner at a time in a process.

    Args:
        bridges: to run; of one app or several.
        url: of the MongoDB replica set; by default the bridge's own.

    Raises:
        ConfigurationError: no bridge was given, or one has no handlers.
    """

    def __init__(self, *bridges: Wired, url: str | None = None) -> None:
        if not bridges:
            raise ConfigurationError("BridgeRunner needs a bridge, such as BridgeRunner(bridge, url=mongo_celery_url).")
        self._wirings = [bridge.wiring for bridge in bridges]
        self._url = url
        self._terms: list[SteppedTerm] = []
        self._broker = MemoryBroker()
        self._recorder = CallRecorder(self._overtake)
        self._known: set[str] = set()
        self._began = self._limit = 0
        self._options = {"retries": True, "duplicates": False}
        self._stack, self._leading = contextlib.ExitStack(), contextlib.ExitStack()

    def __enter__(self) -> Self:
        global _running  # noqa: PLW0603 - queues and connections are the process's
        if _running:
            raise HandlerUsageError("A BridgeRunner runs in this process already; give it both bridges, or end it.")
        with contextlib.ExitStack() as stack:
            _running = True
            stack.callback(_ended)
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
            raise AssertionError(f"no execution came that {awaited}: there was no deliver() behind what asked for it.")

    def _place(self, wiring: Wiring, stack: contextlib.ExitStack) -> None:
        """Have a bridge work elsewhere, and watch its handlers."""
        wiring.app.loader.import_default_modules()  # as workers do, whatever modules the tests import
        wiring.app.finalize(auto=True)
        if not wiring.handlers:
            raise ConfigurationError(
                f"bridge {wiring.name} has no handlers: import the module with the @bridge.on_change functions, "
                "for example with include=[...] of the Celery app.",
            )
        url, state = placed(self._url, wiring), f"mongo_celery_test_{uuid4().hex[:12]}"
        with MongoClient[dict[str, Any]](url) as client:
            now = operation_time(client)
        start_from = Timestamp(now.time, now.inc + 1)
        stack.enter_context(wiring.elsewhere(url, _beginning(wiring.options), database=state, start_from=start_from))
        stack.callback(_drop, wiring.client[state])
        stack.enter_context(self._recorder.watching(wiring))

    @property
    def calls(self) -> Sequence[HandlerCall]:
        """All calls of handlers since it began."""
        return tuple(self._recorder.calls)

    # -- what is to happen -------------------------------------------------------------------------

    def crash(self, at: str = "called", handler: str | None = None, *, times: int = 1, after: int = 0) -> None:
        """
        Have the next executions die, as by SIGKILL: nothing more is written, and the claim is left to lapse.

        Args:
            at: `"claimed"`, before the handler is called; `"called"`, when it has returned and nothing is recorded
                (with `transactional=True` its transaction is committed); `"handled"`, when its success is recorded and
                the commit message is not sent, which `commit="inline"` has not.
            handler: name of the handler that it is about; by default any.
            times: how many, one behind the other.
            after: how many executions pass the point before the first of them.

        Raises:
            HandlerUsageError: there is no such point or handler.
        """
        point, name = checked_point(at), self._checked_handler(handler)
        self._recorder.crashes += [PlannedCrash(point, name, 0 if number else after) for number in range(times)]

    def stall(self, handler: str | None = None) -> None:
        """
        Have the next execution stand still under its claim until all else is done, its own change included.

        It then goes on as a stale one, with the change and the fencing token that it had.

        Args:
            handler: name of the handler that it is about; by default any.

        Raises:
            HandlerUsageError: there is no such handler.
        """
        self._recorder.stalls.append(self._checked_handler(handler))

    @property
    def _handlers(self) -> tuple[str, ...]:
        return tuple(sorted({handler.name for wiring in self._wirings for handler in wiring.handlers}))

    def _checked_handler(self, name: str | None) -> str | None:
        if name is not None:
            _check_handler(name, self._handlers)
        return name

    def snapshot(self, handler: str, *, sources: Sequence[str] = (), match: Mapping[str, Any] | None = None) -> None:
        """
        Have a handler be given the documents that exist, as `changes snapshot start` does: by the next `deliver`.

        Each comes once, as operation type `snapshot`, under a claim at its place between the changes, so that its
        fence is the product's.

        Args:
            handler: its name.
            sources: collections that it watches, `"db.collection"`; all of them by default.
            match: only documents whose event fulfils this expression, as `match=` of a handler.

        Raises:
            HandlerUsageError: there is no such handler.
            CommandRefusedError: it takes no documents, does not watch a source, or the expression is none.
        """
        self._checked_handler(handler)
        text = None if match is None else json_util.dumps(match)
        for wiring, term in zip(self._wirings, self._terms, strict=True):
            if handler in {each.name for each in wiring.handlers}:
                term.ask(handler, sources, text)

    # -- delivering --------------------------------------------------------------------------------

    def deliver(
        self, *, retries: bool = True, duplicates: bool = False, raises: bool = True, limit: int = 1000
    ) -> DeliveredChanges:
        """
        Deliver what was written until now, and what handlers write meanwhile, until nothing is left to do.

        Args:
            retries: whether to move the time of changes that wait for it; else they wait on.
            duplicates: run each message twice, as a broker may deliver it.
            raises: raise the error of a handler that has failed for good, behind its retries.
            limit: most calls of handlers.

        Raises:
            AssertionError: there are more calls than `limit`, a partition stands, a change waits for a server that
                stays away, or what `crash` or `stall` asked for had no occasion to happen.
            Exception: the first failed handler's own.
        """
        began, self._began = len(self.calls), len(self.calls)
        self._limit = limit
        self._options = {"retries": retries, "duplicates": duplicates}
        self._until_idle()
        standing = [each for term in self._terms for each in term.standing()]
        delivered = DeliveredChanges(tuple(self._recorder.calls[began:]), tuple(standing), self._handlers)
        self._demand_faults()
        new, self._known = set(standing) - self._known, set(standing)
        if raises:
            _raise_failures(delivered, sorted(new))
        return delivered

    def sent(self, name: str | None = None) -> list[SentTask]:
        """Tasks that were sent and that nobody has taken yet, the bridges' own left out; of one name, or all."""
        own = {queue for term in self._terms for queue in term.queues}
        found = [
            SentTask.of(queue, message)
            for queue in self._broker.queues()
            if queue not in own
            for message in self._broker.look(queue)
        ]
        return [each for each in found if name is None or each.name == name]

    def assert_enqueued(
        self,
        name: str,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        times: int = 1,
    ) -> None:
        """
        Demand that a task was sent so many times, by `delay` and its like or by an outbox, and is not taken yet.

        Waits some seconds for it, since the thread of an outbox sends.

        Args:
            name: of the task.
            args: as a worker would give them; by default any.
            kwargs: as a worker would give them; by default any.
            times: how often; 0 for never, which can only be asked at once.

        Raises:
            AssertionError: it was not; with what was sent instead.
        """
        until = time.monotonic() + (_SENT_SECONDS if times else 0.0)
        while len([each for each in self.sent() if each.fits(name, args, kwargs)]) < times:
            if time.monotonic() > until:
                break
            time.sleep(_PAUSE_SECONDS)
        found = [each for each in self.sent() if each.fits(name, args, kwargs)]
        if len(found) != times:
            others = ", ".join(map(str, self.sent()[:_SHOWN])) or "nothing"
            raise AssertionError(f"{name} was sent {len(found)} times, not {times}; what was sent: {others}.")

    def run_tasks(self, *, duplicates: bool = False, limit: int = 1000) -> list[SentTask]:
        """
        Run the tasks that were sent, and those that they send, in this process; their retries at once.

        Args:
            duplicates: run each message twice, as a broker may deliver it.
            limit: most messages.

        Returns:
            What was run, each message once.

        Raises:
            AssertionError: there are more messages than `limit`.
            Exception: the first task's own that has failed.
        """
        own = {queue for term in self._terms for queue in term.queues}
        taken: list[SentTask] = []
        with failures_of_tasks() as errors:
            while queues := [queue for queue in self._broker.queues() if queue not in own]:
                message = self._broker.take(queues[0])
                taken.append(SentTask.of(queues[0], message))
                if len(taken) > limit:
                    raise AssertionError(f"more than {limit} tasks were sent, the last of them {taken[-1]}.")
                for _ in range(1 + duplicates):
                    run_message(self._app_of(message), message)
        if errors:
            raise errors[0]
        return taken

    def _app_of(self, message: Any) -> Any:
        apps = [wiring.app for wiring in self._wirings]
        return next((app for app in apps if message.headers["task"] in app.tasks), apps[0])

    def _until_idle(self) -> None:
        """Run messages, and let the listeners have their turns, until both have nothing left."""
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
                    f"nothing has moved for {_STILL_SECONDS:.0f} s, and not all is done; see the log of mongo_celery.",
                )

    def _has_moved(self) -> bool:
        """Let the listeners do what they can without a message; False where nothing is left to do."""
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
        time.sleep(_PAUSE_SECONDS)  # the reader's thread is under way
        return True

    def _end_waits(self) -> bool:
        """Move the times for which changes wait, if that is asked for; whether there were any."""
        waiting = [term for term in self._terms if term.waits()] if self._options["retries"] else []
        for term in waiting:
            term.end_waits()
            term.look()
        return bool(waiting)

    def _has_messages(self) -> bool:
        queues = set(self._broker.queues())
        return any(not queues.isdisjoint(term.queues) for term in self._terms)

    def _run_messages(self) -> bool:
        """Run what lies in the queues of the bridges; whether there was anything."""
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
                f"more than {self._limit} calls of handlers, the last of them {self._recorder.calls[-1]!r}: does a "
                "handler write to what it listens to, or retry without an end?",
            )

    def _demand_faults(self) -> None:
        awaited = self._recorder.awaited
        self._recorder.forget()
        if awaited is not None:
            raise AssertionError(
                f"no execution came that {awaited}: was anything written that a handler is called for?"
            )

    def _overtake(self) -> None:
        """What happens while an execution stands still."""
        self._until_idle()


_running = False


def _ended() -> None:
    global _running  # noqa: PLW0603
    _running = False


def placed(url: str | None, wiring: Wiring) -> str:
    """The given URL with the database that the bridge's own names; by default the bridge's own."""
    if url is None:
        return wiring.url
    try:
        database = wiring.default_database
    except ConfigurationError:  # it has no URL of its own
        return url
    scheme, _, rest = url.partition("://")
    hosts, slash, more = rest.partition("/")
    if not database or (slash and more.partition("?")[0]):
        return url
    return f"{scheme}://{hosts}/{database}{more or ''}"


def _beginning(own: BridgeOptions) -> Callable[[BridgeOptions, Handler], Handler]:
    """Handlers that begin where the runner does, with what exists where they ask for that by the bridge's options."""

    def change(_options: BridgeOptions, handler: Handler) -> Handler:
        return replace(handler, start_from=SNAPSHOT if handler.begins_with_snapshot(own) else None)

    return change


def _raise_failures(delivered: DeliveredChanges, standing: Sequence[str]) -> None:
    for call in delivered.failures:
        assert call.error is not None, "a failure has an error"
        call.error.add_note(f"of {call!r}; {'; '.join(standing) or 'no partition stands'}")
        raise handlers_part(call.error)
    if standing:
        raise AssertionError("; ".join(standing))


@contextlib.contextmanager
def failures_of_tasks() -> Any:
    """Collects the errors of tasks that fail inside."""
    from celery.signals import task_failure

    errors: list[BaseException] = []

    def note(exception: BaseException, **_more: Any) -> None:
        errors.append(exception)

    task_failure.connect(note, weak=False)
    try:
        yield errors
    finally:
        task_failure.disconnect(note)
