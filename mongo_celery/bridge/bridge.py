"""The bridge: one named configuration that joins an app, a cluster and handlers."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from copy import copy
from typing import TYPE_CHECKING, Any, Unpack, cast

from celery import Celery, current_app, current_task, signals
from celery.local import Proxy
from pymongo import MongoClient
from pymongo.collection import Collection

from mongo_celery.app import check_app
from mongo_celery.bridge.declarations import (
    BOUND,
    LOCK,
    DeclaredHandler,
    DeclaredOutbox,
    NoApp,
    bind_all,
    find_shared_handlers,
)
from mongo_celery.bridge.handlers import Handler, refuse_function_as_source
from mongo_celery.bridge.http import make_http_service
from mongo_celery.bridge.listener.in_worker import install
from mongo_celery.bridge.options import BridgeOptions
from mongo_celery.bridge.signatures import HandlerOptions, HandlerTask, OnChange, OnChanges
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

    One that is made with an app is that app's. One without is defined at module level, and is bound by `init_app` to
    each app that an application factory makes: each has the bridge's handlers and outboxes, with tasks, settings, name
    and clients of its own. `app`, `client`, `collection()` and all else that needs an app then mean the only app; of
    several that of the task that runs, else Celery's current app; `of(app)` says which.

    Args:
        app: the Celery app; None to call `init_app` later, for one app or several.
        url: of the MongoDB replica set or sharded cluster; by default the setting
            `mongo_celery_database_url`, which `celery inspect conf` masks.
        name: of the bridge; part of queue names, task ids and state. Letters, digits, `_`, `-`. By default the
            app's own (`Celery("shop")`), where that fits; a bridge without app gets it from `init_app`.
        options: the table in docs/configuration.md.

    Nothing connects before it is needed: not at import, and not in a worker's parent process.

    Raises:
        ConfigurationError: an option is unknown or cannot work, or the app is no Celery app.
    """

    def __init__(
        self, app: Celery | None = None, url: str | None = None, *, name: str | None = None, **options: Any
    ) -> None:
        if url is not None and not isinstance(url, str):
            raise ConfigurationError(
                "Bridge needs a MongoDB URL, not a client: a MongoClient opened before a worker forks cannot be used "
                "after it, so the bridge makes its own.",
            )
        self._declared = Wiring(name, url, options)
        self._handlers: dict[str, DeclaredHandler] = {}
        self._outboxes: dict[str, DeclaredOutbox] = {}
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
        Bind to a Celery app, beside those that it is bound to: queues, tasks and commands become known to that one.

        A second time for the same app does nothing.

        Raises:
            ConfigurationError: it is no Celery app, the bridge was made with one, the app has a bridge of this name, no
                name was given and the app's own cannot serve, or a handler or an outbox cannot work in this app.
        """
        if self._only is not None:
            raise ConfigurationError(
                f"bridge {self.name} is already bound to an app; make it without one, Bridge(), to call init_app for "
                "each of several.",
            )
        with LOCK:
            if self._find_in(app) is None:
                self._bind(app)

    def of(self, app: Celery) -> Bridge:
        """
        This bridge in one of its apps: what it says and registers is for that one alone, which it keeps alive.

        Raises:
            ConfigurationError: it is not bound to the app.
        """
        wiring = self._only or self._find_in(app)
        if wiring is None or wiring.bound is not _itself(app):
            raise ConfigurationError(f"{self!r} is not bound to {app!r}; call init_app(app).")
        bridge: Bridge = wiring.public
        return bridge

    @property
    def wiring(self) -> Wiring:
        """The context of the bridge's own parts; nothing for users."""
        return self._only or self._find_current() or self._declared

    @property
    def name(self) -> str:
        """Part of queue names, task ids and state."""
        return self.wiring.name

    @property
    def app(self) -> Celery:
        """The Celery app."""
        return self.wiring.app

    @property
    def options(self) -> BridgeOptions:
        """The validated options, settings included; reading them loads the app's configuration."""
        return self.wiring.options

    @property
    def url(self) -> str:
        """The MongoDB URL. It may carry a password: never log it."""
        return self.wiring.url

    @property
    def default_database(self) -> str | None:
        """The database that the URL names, if it does."""
        return self.wiring.default_database

    @property
    def handlers(self) -> list[Handler]:
        """The registered handlers, in the order of their names."""
        return self.wiring.handlers

    @property
    def client(self) -> MongoClient[dict[str, Any]]:
        """This process's client: connects lazily, and is made anew after a fork."""
        return self.wiring.client

    @property
    def operations(self) -> Operations:
        """The commands that change the state of the bridge, such as `operations.pause("orders")`."""
        from mongo_celery.bridge.operations.operations import Operations

        return Operations(self.wiring)

    def collection(self, namespace: str) -> Collection[dict[str, Any]]:
        """A collection of the bridge's cluster by `"db.collection"`, or `"collection"` of the URL's database."""
        return self.wiring.collection(namespace)

    def on_change(self, *sources: object, **options: Unpack[HandlerOptions]) -> OnChange:
        """
        Register a handler for changes: a Celery task, and its subscription with a position of its own.

        Afterwards the listener dispatches each matching change to the task, in order within a partition.
        Not promised: that a change is handled only once (see `Change.fenced` and `transactional`).

        Args:
            sources: `"db.collection"`, `"db.*"`, `"*"`, `"collection"` where the URL names a database, a PyMongo
                collection, a Django model or a MongoEngine document class.
            name: of the subscription; by default the function's. Its position is kept under this name.
            operations: operation types, or `"*"` for all; by default insert, update, replace and delete. `drop`,
                `rename`, `dropDatabase` and `invalidate`, and with `show_expanded_events` `create`, `modify` ...,
                come only to handlers that ask for them.
            fields: an update counts only when it touches one of these paths; inserts, replaces and deletes always.
            match: an aggregation expression over the event, computed by the server.
            partition_by: rule of the partition key; by default the bridge's.
            failure_policy: `halt`, `dead_letter`, `park_key`, `skip` or `discard`; by default the bridge's.
            transactional: run the handler in a transaction together with the mark that it is done; the
                session is `change.session`.
            group: of workers: the runs go to the queues `BRIDGE.GROUP.INDEX`, so that they can have workers of their
                own, see `celery -A app changes queues --group`. Letters, digits, `_`, `-`, and not digits alone.
            start_from: where the handler begins while it has no position, as the bridge's option of that name says it;
                by default that one. It is judged once, when a listener first leads with the handler. With `"snapshot"`
                it is given the documents that exist then, too, as operation type `snapshot`.
            commit: `chain`, where a task behind the handler's writes the position, or `inline`, where the execution
                writes it itself: half the messages; by default the bridge's.
            coalesce: of several changes of one document in a run, give the last one only: for a handler that needs no
                more than the latest state.
            bookkeeping: whether the handler gets what this package keeps in documents (the field of an outbox of the
                app, a lock, markers of a transaction, stamps of fenced writes): updates that touch nothing else, these
                fields in the documents of a change, and collections of its own in a database that is watched whole.
            options: also Celery's `bind`, `autoretry_for`, `retry_backoff`, `max_retries`, `rate_limit`,
                `time_limit`, `soft_time_limit` and the like.

        Raises:
            ConfigurationError: when the decorator runs, whatever is wrong with all this.
        """
        refuse_function_as_source(sources, "on_change")

        def decorate(function: Function) -> Any:
            with LOCK:
                return self._declare_handler(DeclaredHandler(function, sources, options))

        return decorate

    def on_changes(self, *sources: object, batch_size: int = 500, **options: Unpack[HandlerOptions]) -> OnChanges:
        """
        Register a bulk handler: as `on_change`, but what it is given is a list of consecutive changes of one partition.

        The list (`Changes`) has at least one change, and is claimed, retried, recorded and replayed like one. Where it
        fails, the handler may say which change it was, by `raise changes.failed_at(change) from error`; else it is
        given halves of the list until the change that fails is alone. Retries and failure policy concern that one.
        Not promised: that a change is given only once, which a list that failed makes likely.

        Args:
            sources: as of `on_change`.
            batch_size: most changes of one list, which is also bounded by the bridge's `run_bytes`; `run_size` is not
                for it. With `transactional=True` all of a list are one transaction.
            options: all others of `on_change`, Celery's among them.

        Raises:
            ConfigurationError: when the decorator runs, whatever is wrong with all this.
        """
        refuse_function_as_source(sources, "on_changes")

        def decorate(function: Function) -> Any:
            with LOCK:
                return self._declare_handler(DeclaredHandler(function, sources, options, batch_size))

        return decorate

    def outbox(self, collection: object, *, watch: bool = True, name: str | None = None, **options: Any) -> Outbox:
        """
        An outbox for a collection of this bridge's cluster, delivered by the listener too.

        Of a bridge without an app it is the outbox of the app that is meant when it is used: each app has one.

        Args:
            collection: `"db.collection"`, `"collection"` where the URL names a database, or a PyMongo collection
                (its namespace is what counts; the client is the bridge's).
            watch: whether the listener delivers; else only the writer and the sweep do.
            name: of the outbox; by default the namespace as given.
            options: of `Outbox`.

        Raises:
            ConfigurationError: an option cannot work, or the bridge or one of its apps has an outbox of this name.
        """
        namespace = collection.full_name if isinstance(collection, Collection) else collection
        if not isinstance(namespace, str):
            raise ConfigurationError(f"outbox({collection!r}): name the collection as 'db.collection'.")
        declared = DeclaredOutbox(namespace, name or namespace, options, watch)
        with LOCK:
            if self._only is not None:
                (made,) = bind_all([(declared, self._only)])
                return cast("Outbox", made)
            return self._declare_outbox(declared)

    def _declare_outbox(self, declared: DeclaredOutbox) -> Outbox:
        if declared.name in self._outboxes:
            raise ConfigurationError(
                f"bridge {self._declared.name} already has an outbox named {declared.name!r}; give this one "
                "name='...', or make it by bridge.of(app).outbox(...) for the app that is just made.",
            )
        bind_all([(declared, wiring) for wiring in self._bound])
        self._outboxes[declared.name] = declared
        outbox: Any = Proxy(lambda: self._find_made(lambda wiring: wiring.outboxes[declared.name]))
        return cast("Outbox", outbox)

    def _declare_handler(self, declared: DeclaredHandler) -> HandlerTask[Any, Any]:
        task: HandlerTask[Any, Any]
        if self._only is not None:
            (task,) = bind_all([(declared, self._only)])
            return task
        handler = declared.make_handler()
        with self._declared.keep_handlers_on_error():
            self._declared.add(handler)
            bind_all([(declared, wiring) for wiring in self._bound])
        self._handlers[handler.name] = declared
        found: Any = Proxy(lambda: self._find_task(handler))
        task = found
        return task

    def _find_task(self, handler: Handler) -> Any:
        """Return the task of the app that is meant; without any app the function."""
        if not self._bound:
            return handler.function
        return self._find_made(lambda wiring: wiring.app.tasks[wiring.task_name(handler.name)])

    def _find_made(self, find: Callable[[Wiring], Any]) -> Any:
        """Return what the app has that is meant; without one what can be inspected, and not used."""
        try:
            wiring = self.wiring
            _ = wiring.app
        except ConfigurationError as error:
            return NoApp(error)
        return find(wiring)

    def _bind(self, app: Celery, public: Bridge | None = None) -> Wiring:
        """Make the bridge known to an app, with all that was declared for it."""
        check_app(app)
        app = _itself(app)
        wiring = self._declared.of(app)
        wiring.public = public or self._in(wiring)
        BRIDGES.refuse(app, wiring.name)
        handlers = [*self._handlers.values(), *find_shared_handlers(wiring)]
        declared: list[DeclaredHandler | DeclaredOutbox] = [*handlers, *self._outboxes.values()]
        bind_all([(each, wiring) for each in declared])
        if BRIDGES.add(app, wiring, wiring.name):
            register_commit(app)
            install(app, make_http_service)
            install_intake(app)
            discover_last()
        self._bound.add(wiring)
        BOUND.add(wiring)
        return wiring

    def _in(self, wiring: Wiring) -> Bridge:
        """The bridge in one app, as one that was made with it."""
        bridge = copy(self)
        bridge._only = wiring  # noqa: SLF001 - its own
        return bridge

    def _find_in(self, app: Celery) -> Wiring | None:
        app = _itself(app)
        return next((wiring for wiring in self._bound if wiring.bound is app), None)

    def _find_current(self) -> Wiring | None:
        """
        Return the bridge in the only app; of several in that of the task that runs, else in Celery's current app.

        Raises:
            ConfigurationError: there are several apps, and neither says which one is meant.
        """
        if len(self._bound) > 1:
            found = (self._find_in(current_task.app) if current_task else None) or self._find_in(current_app)
            if found is not None:
                return found
            gc.collect()  # an app is full of cycles: one that nobody can reach any more is not meant
            if len(self._bound) > 1:
                raise ConfigurationError(
                    f"bridge {self._declared.name} is bound to {len(self._bound)} apps, and Celery's current app is "
                    "none of them: ask bridge.of(app), or call app.set_current() (in all threads: app.set_default()).",
                )
        return next(iter(self._bound), None)


def _itself(app: Celery) -> Celery:
    """Return the object of a proxy, such as Celery's own `current_app`."""
    found: Celery = getattr(app, "_get_current_object", lambda: app)()
    return found


def discover_last() -> None:
    """
    Look for modules when an app imports its own, after all that listens for that so far.

    Celery's fixup sets Django up then, for apps that were made before; until it has, no module with a model can be
    imported, and it says of no Django application that it is there. To be called for each app that is bound.
    """
    signals.import_modules.disconnect(_discover)
    signals.import_modules.connect(_discover, weak=False)


def _discover(sender: Any = None, **_arguments: Any) -> None:
    """Import the modules of an app with a bridge that has `autodiscover`, as workers, commands and tests do."""
    if not isinstance(sender, Celery) or not any(each.given.get("autodiscover", True) for each in BRIDGES.of(sender)):
        return
    sender.autodiscover_tasks(related_name="changes", force=True)  # Django's applications
    sender.autodiscover_tasks(lambda: _packages(sender), related_name="changes", force=True)


def _packages(app: Celery) -> list[str]:
    """Packages of the modules that the app includes: a module named `changes` may be beside them."""
    modules = (*(app.conf.include or ()), *(app.conf.imports or ()))
    return sorted({package for package in (module.rpartition(".")[0] for module in modules) if package})
