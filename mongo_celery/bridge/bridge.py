"""The bridge: one named configuration that joins an app, a cluster and handlers."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from copy import copy
from typing import TYPE_CHECKING, Any, Unpack, cast

from celery import Celery, current_app, current_task, signals
from celery.local import Proxy
from pymongo import AsyncMongoClient, MongoClient
from pymongo.collection import Collection

from mongo_celery.app import check_app
from mongo_celery.bridge.declarations import (
    LOCK,
    Declared,
    DeclaredHandler,
    DeclaredOutbox,
    NoApp,
    OnChange,
    OnChanges,
    bind_all,
)
from mongo_celery.bridge.handlers import Handler, HandlerOptions, refuse_function_as_source
from mongo_celery.bridge.http import make_http_service
from mongo_celery.bridge.listener.in_worker import install
from mongo_celery.bridge.options import BridgeOptions
from mongo_celery.bridge.wiring import BRIDGES, Wiring
from mongo_celery.bridge.worker import lifetime  # noqa: F401 - its signals
from mongo_celery.bridge.worker.intake import install_intake
from mongo_celery.bridge.worker.tasks import register_commit
from mongo_celery.errors import ConfigurationError
from mongo_celery.outbox import Outbox

if TYPE_CHECKING:
    from mongo_celery.bridge.operations.operations import Operations

Function = Callable[..., Any]


class Bridge:
    """
    Turns changes in MongoDB into Celery tasks: at least once, in order per partition.

    If you pass an app, the bridge belongs to it. With application factories, define the bridge at module level without
    an app, and bind it to each app with `init_app`. Each app has the bridge's handlers and outboxes, with its own
    tasks, settings, name and clients. With one app, `app`, `client`, `collection()` and other members use it. With
    several apps, they use the app of the running task, or Celery's current app. `of(app)` chooses one.

    Args:
        app: the Celery app. None to call `init_app` later, for one app or several.
        url: URL of the MongoDB replica set or sharded cluster. By default the setting
            `mongo_celery_database_url`, which `celery inspect conf` masks.
        name: part of queue names, task ids and state. Letters, digits, `_`, `-`. By default the
            app's name (`Celery("shop")`), if it is valid. A bridge without an app gets it from `init_app`.
        options: the table in docs/configuration.md.

    It connects at first use, not at import and not in a worker's parent process.

    Raises:
        ConfigurationError: an option is unknown or cannot work, or the app is not a Celery app.
    """

    def __init__(
        self, app: Celery | None = None, url: str | None = None, *, name: str | None = None, **options: Any
    ) -> None:
        if url is not None and not isinstance(url, str):
            raise ConfigurationError(
                "Bridge needs a MongoDB URL, not a client, because a MongoClient cannot be used after a worker forks. "
                "Pass the URL, such as 'mongodb://localhost/shop'.",
            )
        self._declared = Wiring(name, url, options)
        self._declarations: dict[tuple[type[Declared], str], Declared] = {}
        self._bound: weakref.WeakSet[Wiring] = weakref.WeakSet()
        self._only: Wiring | None = None
        if app is not None:
            with LOCK:
                self._only = self._bind(app, self)

    def __repr__(self) -> str:
        declared = self._only or self._declared
        return f"<Bridge {declared.name} handlers={[handler.name for handler in declared.handlers]}>"

    def init_app(self, app: Celery) -> None:
        """
        Bind the bridge to one more Celery app, which then has the bridge's queues, tasks and commands.

        A second call for the same app does nothing.

        Raises:
            ConfigurationError: it is not a Celery app, the bridge was made with one, the app has a bridge of this name,
                no valid name is known, or a handler or an outbox cannot work in this app.
        """
        if self._only is not None:
            raise ConfigurationError(
                f"bridge {self.name} already has an app, because it was made with one. To use it in several apps, make "
                "it with Bridge(), and call init_app for each app.",
            )
        with LOCK:
            if self._find_in(app) is None:
                self._bind(app)

    def of(self, app: Celery) -> Bridge:
        """
        Return this bridge bound to one of its apps. It works for this app only, and keeps the app alive.

        Raises:
            ConfigurationError: it is not bound to the app.
        """
        wiring = self._only or self._find_in(app)
        if wiring is None or wiring.bound is not _itself(app):
            raise ConfigurationError(f"{self!r} is not bound to {app!r}. Call init_app(app) first.")
        bridge: Bridge = wiring.public
        return bridge

    @property
    def wiring(self) -> Wiring:
        """The internal context of the bridge. Do not use it."""
        return self._only or self._find_current() or self._declared

    @property
    def name(self) -> str:
        """The name of the bridge, a part of queue names, task ids and state."""
        return self.wiring.name

    @property
    def app(self) -> Celery:
        """The Celery app."""
        return self.wiring.app

    @property
    def options(self) -> BridgeOptions:
        """The validated options, including settings. Reading them loads the app's configuration."""
        return self.wiring.options

    @property
    def url(self) -> str:
        """The MongoDB URL. It may carry a password: never log it."""
        return self.wiring.url

    @property
    def handlers(self) -> list[Handler]:
        """The registered handlers, in the order of their names."""
        return self.wiring.handlers

    @property
    def client(self) -> MongoClient[dict[str, Any]]:
        """This process's client. It connects at first use, and a forked process gets a new one."""
        return self.wiring.client

    @property
    def async_client(self) -> AsyncMongoClient[dict[str, Any]]:
        """
        This process's `AsyncMongoClient` for `async def` handlers. Use it only there: it belongs to their event loop.

        ::

            @bridge.on_change("shop.orders")
            async def copy(change):
                copies = change.fenced(bridge.async_client.shop.copies)
                await copies.replace_one(change.document_key, change.full_document or {}, upsert=True)
        """
        return self.wiring.async_client

    @property
    def operations(self) -> Operations:
        """The commands that change the state of the bridge, such as `operations.pause("orders")`."""
        from mongo_celery.bridge.operations.operations import Operations

        return Operations(self.wiring)

    def collection(self, namespace: str) -> Collection[dict[str, Any]]:
        """Return a collection of the bridge's cluster: `"db.collection"`, or `"collection"` of the URL's database."""
        return self.wiring.collection(namespace)

    def on_change(self, *sources: object, **options: Unpack[HandlerOptions]) -> OnChange:
        """
        Register a handler for changes: a Celery task with its own position in the stream.

        Afterwards the listener dispatches each matching change to the task, in order within a partition.
        A change may be handled more than once (see `Change.fenced` and `transactional`).

        The function may be a coroutine function (`async def`). All of a process run on one event loop, so they can
        share clients. It needs a prefork, threads or solo pool. Celery's soft time limit cancels it.

        Args:
            sources: `"db.collection"`, `"db.*"`, `"*"`, `"collection"` if the URL names a database, a PyMongo
                collection, a Django model or a MongoEngine document class.
            name: the handler's name, by default the function's. Its position is stored under this name.
            operations: operation types, or `"*"` for all. By default insert, update, replace and delete. A handler gets
                `drop`, `rename`, `dropDatabase` and `invalidate` only if they are in this list. The same is true of
                `create`, `modify` ... with `show_expanded_events`.
            fields: updates count only if they change one of these paths. Inserts, replaces and deletes always count.
            match: an aggregation expression over the event, computed by the server.
            partition_by: rule of the partition key. By default the bridge's.
            failure_policy: `halt`, `dead_letter`, `park_key`, `skip` or `discard`. By default the bridge's.
            transactional: run the handler in a transaction that also records its success. The session is
                `change.session`, of `client` or, for a coroutine function, of `async_client`.
            group: name of a worker group. Runs go to the queues `BRIDGE.GROUP.INDEX`, which can have their own workers:
                see `celery -A app changes queues --group`. Letters, digits, `_`, `-`, and not only digits.
            start_from: the start of a handler without a position. By default the bridge's `start_from`. It applies
                once, when a listener first leads with the handler. With `"snapshot"` the handler also gets the
                documents that exist then, with the operation type `snapshot`.
            commit: `chain` (a second task writes the position after the handler), or `inline` (the execution writes it,
                with half the messages). By default the bridge's.
            coalesce: give only the last of several changes of one document in a run. Use it for handlers that need only
                the latest state.
            delay: seconds or a `timedelta`, at most a day. No change runs sooner than this long after its cluster time,
                by MongoDB's clock. It may wait one second longer, because cluster times have whole seconds. With
                `coalesce=True` a partition key, by default a document, runs when it has been quiet for this long. After
                two delays, the overlapping bursts of a partition may be split into two runs. After ten delays, all its
                due changes run. Snapshot rows and replayed dead letters are due immediately, and a retry has its own
                countdown.
            max_running: largest number of executions of this handler at a time, over all workers. Exact, also across
                kills and take-overs. A list of `on_changes` is one execution.
            rate: largest number of executions per period, over all workers: `"10/s"`, `"100/m"`, `"1000/h"`, or a
                number per second. Those of one second and one more may start together. Celery's `rate_limit` is per
                worker.
            bookkeeping: also give the handler the fields that this package keeps in documents: entries of an outbox,
                locks, markers of a transaction, stamps of fenced writes. It then gets updates that change only these
                fields, and the package's collections in a database that is watched as a whole.
            options: also Celery's `bind`, `autoretry_for`, `retry_backoff`, `max_retries`, `rate_limit`,
                `time_limit`, `soft_time_limit` and so on.

        Raises:
            ConfigurationError: an option or source is wrong. It is raised when the decorator runs.
        """
        refuse_function_as_source(sources, "on_change")

        def decorate(function: Function) -> Any:
            with LOCK:
                return self._declare(DeclaredHandler(function, sources, options))

        return decorate

    def on_changes(self, *sources: object, batch_size: int = 500, **options: Unpack[HandlerOptions]) -> OnChanges:
        """
        Register a bulk handler: as `on_change`, but it gets a list of consecutive changes of one partition.

        The list (`Changes`) has at least one change. It is claimed, retried, recorded and replayed like one change. If
        it fails, the handler can name the failed change by `raise changes.failed_at(change) from error`. Otherwise it
        gets halves of the list until the failing change is alone. Retries and failure policy apply to this change.
        A change may be given more than once, usually after a failed list.

        Args:
            sources: as for `on_change`.
            batch_size: the largest number of changes in a list. The bridge's `run_bytes` also limits a list, `run_size`
                does not. With `transactional=True` one transaction covers all changes of a list.
            options: all other options of `on_change`, including Celery's.

        Raises:
            ConfigurationError: an option or source is wrong. It is raised when the decorator runs.
        """
        refuse_function_as_source(sources, "on_changes")

        def decorate(function: Function) -> Any:
            with LOCK:
                return self._declare(DeclaredHandler(function, sources, options, batch_size))

        return decorate

    def outbox(self, collection: object, *, watch: bool = True, name: str | None = None, **options: Any) -> Outbox:
        """
        Return an outbox for a collection of this bridge's cluster. The listener delivers its entries too, unless
        `watch=False`.

        If the bridge was made without an app, each app has its own outbox, and calls use that of the current app.

        Args:
            collection: `"db.collection"`, `"collection"` if the URL names a database, or a PyMongo collection
                (only its namespace counts, the client is the bridge's).
            watch: True if the listener delivers. With False, only the writer and the sweep deliver.
            name: the outbox's name. By default the namespace as given.
            options: the options of `Outbox`.

        Raises:
            ConfigurationError: an option cannot work, or the bridge or one of its apps has an outbox of this name.
        """
        namespace = collection.full_name if isinstance(collection, Collection) else collection
        if not isinstance(namespace, str):
            raise ConfigurationError(
                f"outbox({collection!r}) needs a collection, such as 'shop.orders' or a PyMongo collection."
            )
        declared = DeclaredOutbox(namespace, name or namespace, options, watch)
        with LOCK:
            return cast("Outbox", self._declare(declared))

    def _declare(self, declared: Declared) -> Any:
        """Register a handler or an outbox in each app. Return it, or a proxy if there may be several apps."""
        if self._only is not None:
            return bind_all([(declared, self._only)])[0]
        key = type(declared), declared.name
        if isinstance(declared, DeclaredOutbox) and key in self._declarations:
            raise ConfigurationError(
                f"bridge {self._declared.name} already has an outbox named {declared.name!r}. Give this one another "
                "name='...'. In a function that makes an app, use bridge.of(app).outbox(...).",
            )
        with self._declared.keep_handlers_on_error():
            if isinstance(declared, DeclaredHandler):
                self._declared.add(declared.make_handler())
            bind_all([(declared, wiring) for wiring in self._bound])
        self._declarations[key] = declared
        return Proxy(lambda: self._find_made(declared))

    def _find_made(self, declared: Declared) -> Any:
        """Return the task or outbox of the current app. Without an app, return the function or a stand-in."""
        if not self._bound and isinstance(declared, DeclaredHandler):
            return declared.function
        try:
            wiring = self.wiring
            _ = wiring.app
        except ConfigurationError as error:
            return NoApp(error)
        return declared.find(wiring)

    def _bind(self, app: Celery, public: Bridge | None = None) -> Wiring:
        """Register the bridge and all its declarations in an app."""
        check_app(app)
        app = _itself(app)
        wiring = self._declared.of(app)
        wiring.public = public or self._in(wiring)
        BRIDGES.refuse(app, wiring.name)
        bind_all([(each, wiring) for each in self._declarations.values()])
        if BRIDGES.add(app, wiring, wiring.name):
            register_commit(app)
            install(app, make_http_service)
            install_intake(app)
            discover_last()
        self._bound.add(wiring)
        return wiring

    def _in(self, wiring: Wiring) -> Bridge:
        """Return the bridge in one app, as if it had been made with this app."""
        bridge = copy(self)
        bridge._only = wiring  # noqa: SLF001 - its own
        return bridge

    def _find_in(self, app: Celery) -> Wiring | None:
        app = _itself(app)
        return next((wiring for wiring in self._bound if wiring.bound is app), None)

    def _find_current(self) -> Wiring | None:
        """
        Return the bridge in the only app. With several, use the running task's app or Celery's current one.

        Raises:
            ConfigurationError: there are several apps, and neither a task nor Celery chooses one.
        """
        if len(self._bound) > 1:
            found = (self._find_in(current_task.app) if current_task else None) or self._find_in(current_app)
            if found is not None:
                return found
            gc.collect()  # an app is full of cycles: ignore those that are unreachable but not yet collected
            if len(self._bound) > 1:
                raise ConfigurationError(
                    f"bridge {self._declared.name} is bound to {len(self._bound)} apps, and Celery's current app is "
                    "none of them. Use bridge.of(app), or call app.set_current() or, for all threads, "
                    "app.set_default().",
                )
        return next(iter(self._bound), None)


def _itself(app: Celery) -> Celery:
    """Return the object behind a proxy, such as Celery's own `current_app`."""
    found: Celery = getattr(app, "_get_current_object", lambda: app)()
    return found


def discover_last() -> None:
    """
    Import handler modules when an app imports its own, after all receivers connected so far.

    At that time Celery has set up Django, even for apps that were made earlier. Before that, modules with models cannot
    be imported. Call it for each app that you bind.
    """
    signals.import_modules.disconnect(_discover)
    signals.import_modules.connect(_discover, weak=False)


def _discover(sender: Any = None, **_arguments: Any) -> None:
    """Import the handler modules of an app if a bridge has `autodiscover`. Workers, commands and tests do this."""
    if not isinstance(sender, Celery) or not any(each.given.get("autodiscover", True) for each in BRIDGES.of(sender)):
        return
    sender.autodiscover_tasks(related_name="changes", force=True)  # Django's applications
    sender.autodiscover_tasks(lambda: _packages(sender), related_name="changes", force=True)


def _packages(app: Celery) -> list[str]:
    """Return the packages of the modules that the app includes. Each may contain a module named `changes`."""
    modules = (*(app.conf.include or ()), *(app.conf.imports or ()))
    return sorted({package for package in (module.rpartition(".")[0] for module in modules) if package})
