"""The bridge: one named configuration that joins an app, a cluster and handlers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from celery import Celery
from celery.local import Proxy
from pymongo import MongoClient
from pymongo.collection import Collection

from mongo_celery.bridge.handlers import Handler, check_function, make_handler, refuse_function_as_source
from mongo_celery.bridge.http.launch import serving
from mongo_celery.bridge.listener.in_worker import install
from mongo_celery.bridge.options import BridgeOptions, PartitionKey, StartFrom
from mongo_celery.bridge.wiring import BRIDGES, Wiring
from mongo_celery.bridge.worker import queues  # noqa: F401 - its signals
from mongo_celery.bridge.worker.tasks import make_task, register_commit
from mongo_celery.errors import ConfigurationError
from mongo_celery.mongo.opening import DEFAULT_DATABASE
from mongo_celery.outbox import Outbox
from mongo_celery.outbox.watching import OPERATIONS, delivery_handler, handler_name, still_pending, watched_fields

Function = Callable[..., Any]

_ARGUMENTS: dict[str, Any] = {
    **dict.fromkeys(
        ("name", "operations", "fields", "match", "partition_by", "failure_policy", "group", "start_from", "commit")
    ),
    "transactional": False,
    "coalesce": False,
    "bookkeeping": False,
}
"""What `on_change` takes for itself, and what it takes by default; all else is for Celery's task."""


class Bridge:
    """
    Turns changes in MongoDB into Celery tasks: at least once, in order per partition.

    Args:
        app: the Celery app; None to call `init_app` later.
        url: of the MongoDB replica set or sharded cluster; by default the setting
            `mongo_celery_database_url`, which `celery inspect conf` masks.
        name: of the bridge; part of queue names, task ids and state. Letters, digits, `_`, `-`. By default the
            app's own (`Celery("shop")`), where that fits; a bridge without app gets it from `init_app`.
        options: the table in docs/configuration.md.

    Attributes:
        wiring: what the bridge's own parts are handed; nothing for users.

    Nothing connects before it is needed: not at import, and not in a worker's parent process.

    Raises:
        ConfigurationError: an option is unknown or cannot work.
    """

    def __init__(
        self, app: Celery | None = None, url: str | None = None, *, name: str | None = None, **options: Any
    ) -> None:
        if url is not None and not isinstance(url, str):
            raise ConfigurationError(
                "Bridge needs a MongoDB URL, not a client: a MongoClient opened before a worker forks cannot be used "
                "after it, so the bridge makes its own.",
            )
        self.wiring = Wiring(name, url, options)
        self._waiting: list[Callable[[Celery], None]] = []
        if app is not None:
            self.init_app(app)

    def __repr__(self) -> str:
        return f"<Bridge {self.name} handlers={[handler.name for handler in self.handlers]}>"

    def init_app(self, app: Celery) -> None:
        """
        Bind to a Celery app: queues, tasks and commands become known to it.

        Raises:
            ConfigurationError: it is bound already, the app has a bridge of this name, or no name was given and
                the app's own cannot serve.
        """
        if self.wiring.bound is not None:
            raise ConfigurationError(f"bridge {self.name} is already bound to an app; make one Bridge for each app.")
        if BRIDGES.add(app, self.wiring, self.wiring.name_in(app)):
            register_commit(app)
            install(app, serving)
        self.wiring.bound = app
        if self.wiring.given.get("autodiscover", True):
            app.autodiscover_tasks(related_name="changes")  # Django's applications
            app.autodiscover_tasks(lambda: _packages(app), related_name="changes")
        for handler in self.handlers:
            self.wiring.refuse_shared_task(handler)
        for register in self._waiting:
            register(app)
        self._waiting.clear()

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

    def collection(self, namespace: str) -> Collection[dict[str, Any]]:
        """A collection of the bridge's cluster by `"db.collection"`, or `"collection"` of the URL's database."""
        return self.wiring.collection(namespace)

    def on_change(
        self,
        *sources: object,
        name: str | None = None,
        operations: Iterable[str] | None = None,
        fields: Iterable[str] | None = None,
        match: Mapping[str, Any] | None = None,
        partition_by: PartitionKey | None = None,
        failure_policy: str | None = None,
        transactional: bool = False,
        group: str | None = None,
        start_from: StartFrom | None = None,
        commit: str | None = None,
        coalesce: bool = False,
        bookkeeping: bool = False,
        **task_options: Any,
    ) -> Callable[[Function], Any]:
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
            bookkeeping: whether updates count that touch nothing but what this package keeps in documents (the field
                of an outbox of the app, a lock, markers of a transaction, stamps of fenced writes), and changes of
                collections of its own in a database that is watched whole.
            task_options: Celery's `bind`, `autoretry_for`, `retry_backoff`, `max_retries`, `rate_limit`,
                `time_limit`, `soft_time_limit` and the like.

        Raises:
            ConfigurationError: when the decorator runs, whatever is wrong with all this.
        """
        refuse_function_as_source(sources)
        arguments = {
            "name": name,
            "operations": operations,
            "fields": fields,
            "match": match,
            "partition_by": partition_by,
            "failure_policy": failure_policy,
            "transactional": transactional,
            "group": group,
            "start_from": start_from,
            "commit": commit,
            "coalesce": coalesce,
            "bookkeeping": bookkeeping,
        }

        def decorate(function: Function) -> Any:
            return self._register(function, sources, arguments, task_options)

        return decorate

    def on_changes(self, *sources: object, batch_size: int = 500, **options: Any) -> Callable[[Function], Any]:
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
        own = {name: options.pop(name, default) for name, default in _ARGUMENTS.items()}

        def decorate(function: Function) -> Any:
            return self._register(function, sources, {**own, "batch_size": batch_size}, options)

        return decorate

    def outbox(self, collection: object, *, watch: bool = True, name: str | None = None, **options: Any) -> Outbox:
        """
        An outbox for a collection of this bridge's cluster, delivered by the listener too.

        Args:
            collection: `"db.collection"`, `"collection"` where the URL names a database, or a PyMongo collection
                (its namespace is what counts; the client is the bridge's).
            watch: whether the listener delivers; else only the writer and the sweep do.
            name: of the outbox; by default the namespace as given.
            options: of `Outbox`.

        Raises:
            ConfigurationError: the bridge has no app yet, or an option cannot work.
        """
        namespace = collection.full_name if isinstance(collection, Collection) else collection
        if not isinstance(namespace, str):
            raise ConfigurationError(f"outbox({collection!r}): name the collection as 'db.collection'.")
        made = Outbox(
            self.app,
            lambda: self.collection(namespace),
            name=name or namespace,
            **{"database": self.wiring.given.get("database", DEFAULT_DATABASE), **options},
        )
        if watch:
            self.on_change(
                namespace,
                name=handler_name(namespace),
                operations=OPERATIONS,
                fields=watched_fields(made.backing.field),
                match=still_pending(made.backing.field),
                partition_by="_id",
                bind=True,
            )(delivery_handler(lambda: made.backing.relay, namespace))
        return made

    def _register(
        self,
        function: Function,
        sources: tuple[object, ...],
        arguments: Mapping[str, Any],
        task_options: Mapping[str, Any],
    ) -> Any:
        given = "the changes" if arguments.get("batch_size") is not None else "the change"
        check_function(function, bind=bool(task_options.get("bind")), given=given)  # before its name is asked for
        bound = self.wiring.bound
        make = partial(
            make_handler,
            function,
            sources,
            task_name=_task_name(bound, function),
            arguments=arguments,
            task_options=task_options,
        )
        handler = self.wiring.judged(make)
        self.wiring.add(handler)
        if bound is not None:
            return make_task(self.wiring, bound, handler, {"bridge": self, **task_options})
        self._waiting.append(lambda app: make_task(self.wiring, app, handler, {"bridge": self, **task_options}))
        return Proxy(lambda: self.app.tasks[handler.task_name])


def _packages(app: Celery) -> list[str]:
    """Packages of the modules that the app includes: a module named `changes` may stand beside them."""
    modules = (*(app.conf.include or ()), *(app.conf.imports or ()))
    return sorted({package for package in (module.rpartition(".")[0] for module in modules) if package})


def _task_name(app: Celery | None, function: Function) -> str:
    name = getattr(function, "__name__", "handler")
    module = getattr(function, "__module__", "")
    return app.gen_task_name(name, module) if app is not None else f"{module}.{name}"
