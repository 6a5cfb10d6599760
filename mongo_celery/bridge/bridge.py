"""The bridge: one named configuration that joins an app, a cluster and handlers."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from bson.raw_bson import RawBSONDocument
from celery import Celery
from celery.local import Proxy
from pymongo import MongoClient
from pymongo.collection import Collection
from pymongo.errors import ConfigurationError as ClientConfigurationError
from pymongo.errors import InvalidURI
from pymongo.uri_parser import parse_uri

from mongo_celery.app import add_bridge, bridges_by_name, find_bridge
from mongo_celery.bridge.handlers import Handler, check_function, make_handler, refuse_function_as_source
from mongo_celery.bridge.listener.in_worker import install
from mongo_celery.bridge.options import SETTING_PREFIX, BridgeOptions, PartitionKey, early, merged
from mongo_celery.bridge.worker import queues  # noqa: F401 - its signals
from mongo_celery.bridge.worker.side import WorkerSide
from mongo_celery.bridge.worker.tasks import make_task, register_commit
from mongo_celery.errors import ConfigurationError
from mongo_celery.mongo.opening import DEFAULT_DATABASE
from mongo_celery.mongo.redaction import keep_commands_out_of_logs, short
from mongo_celery.outbox import Outbox
from mongo_celery.outbox.watching import FIELDS, OPERATIONS, STILL_PENDING, delivery_handler, handler_name

Function = Callable[..., Any]

_CLIENT_DEFAULTS: dict[str, Any] = {
    "appname": "mongo_celery",
    "connecttimeoutms": 2000,  # also bounds how long a frozen primary goes unnoticed
    "heartbeatfrequencyms": 2000,
    "serverselectiontimeoutms": 10_000,
    "datetime_conversion": "DATETIME_AUTO",  # a year 10000 must not stop a partition
}


class Bridge:
    """
    Turns changes in MongoDB into Celery tasks: at least once, in order per partition.

    Args:
        app: the Celery app; None to call `init_app` later.
        url: of the MongoDB replica set or sharded cluster; by default the setting
            `mongo_celery_database_url`, which `celery inspect conf` masks.
        name: of the bridge; part of queue names, task ids and state. Letters, digits, `_`, `-`.
        options: see the README's configuration table.

    Nothing connects before it is needed: not at import, and not in a worker's parent process.

    Raises:
        ConfigurationError: an option is unknown or cannot work.
    """

    def __init__(
        self, app: Celery | None = None, url: str | None = None, *, name: str = "default", **options: Any
    ) -> None:
        if url is not None and not isinstance(url, str):
            raise ConfigurationError(
                "Bridge needs a MongoDB URL, not a client: a MongoClient opened before a worker forks cannot be used "
                "after it, so the bridge makes its own.",
            )
        self.name = name
        self._url = url
        self._given = {"name": name, **options}
        self._early = early(self._given)
        self._options: BridgeOptions | None = None
        self._app: Celery | None = None
        self._handlers: dict[str, Handler] = {}
        self._waiting: list[Callable[[Celery], None]] = []
        self._lock = threading.RLock()
        self._process: tuple[int, MongoClient[dict[str, Any]], WorkerSide] | None = None
        if app is not None:
            self.init_app(app)

    def __repr__(self) -> str:
        return f"<Bridge {self.name} handlers={sorted(self._handlers)}>"

    def init_app(self, app: Celery) -> None:
        """
        Bind to a Celery app: queues, tasks and commands become known to it.

        Raises:
            ConfigurationError: it is bound already, or the app has a bridge of this name.
        """
        if self._app is not None:
            raise ConfigurationError(f"bridge {self.name} is already bound to an app; make one Bridge for each app.")
        if add_bridge(app, self):
            register_commit(app, lambda name: find_bridge(app, name))
            install(app)
        self._app = app
        if self._given.get("autodiscover", True):
            app.autodiscover_tasks(related_name="changes")  # Django's applications
            app.autodiscover_tasks(lambda: _packages(app), related_name="changes")
        for handler in self.handlers:
            self._refuse_shared_task(handler)
        for register in self._waiting:
            register(app)
        self._waiting.clear()

    @property
    def app(self) -> Celery:
        """The Celery app."""
        if self._app is None:
            raise ConfigurationError(f"bridge {self.name} has no app yet; pass one, or call init_app(app).")
        return self._app

    @property
    def options(self) -> BridgeOptions:
        """The validated options, settings included; reading them loads the app's configuration."""
        if self._options is None:
            self._options = merged(self._given, _settings(self.app))
        return self._options

    @property
    def url(self) -> str:
        """The MongoDB URL. It may carry a password: never log it."""
        url = self._url or self.app.conf.get(f"{SETTING_PREFIX}database_url")
        if not url:
            raise ConfigurationError(
                f"bridge {self.name} has no MongoDB URL: pass it to Bridge(app, url) or set mongo_celery_database_url.",
            )
        return str(url)

    @property
    def default_database(self) -> str | None:
        """The database that the URL names, if it does."""
        try:
            if self.url.startswith("mongodb+srv"):  # parsing it would ask the name server
                return _path(self.url)
            database: str | None = parse_uri(self.url, validate=False)["database"]
            return database
        except (InvalidURI, ClientConfigurationError, ValueError) as error:
            raise ConfigurationError(f"the MongoDB URL of bridge {self.name} is not valid: {short(error)}") from None

    @property
    def handlers(self) -> list[Handler]:
        """The registered handlers, in the order of their names."""
        return [self._handlers[name] for name in sorted(self._handlers)]

    @property
    def client(self) -> MongoClient[dict[str, Any]]:
        """This process's client: connects lazily, and is made anew after a fork."""
        return self._of_process()[1]

    @property
    def worker(self) -> WorkerSide:
        """This process's store, heartbeats and envelope key."""
        return self._of_process()[2]

    def stream_client(self, timeout: float) -> MongoClient[RawBSONDocument]:
        """A client of its own for one change stream, with a socket timeout in seconds."""
        keep_commands_out_of_logs()
        given = _url_options(self.url)
        options = _client_options(given)
        if "sockettimeoutms" not in given:
            options["sockettimeoutms"] = int(timeout * 1000)
        return MongoClient(self.url, document_class=RawBSONDocument, **options)

    def collection(self, namespace: str) -> Collection[dict[str, Any]]:
        """A collection of the bridge's cluster by `"db.collection"`, or `"collection"` of the URL's database."""
        database, dot, name = namespace.partition(".")
        if not dot:
            default = self.default_database
            if default is None:
                raise ConfigurationError(f"{namespace!r} names no database; write 'db.{namespace}'.")
            database, name = default, namespace
        return self.client[database][name]

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
            operations: operation types; by default insert, update, replace and delete. `drop`, `rename`,
                `dropDatabase` and `invalidate` come only to handlers that ask for them.
            fields: an update counts only when it touches one of these paths; inserts, replaces and deletes always.
            match: an aggregation expression over the event, computed by the server.
            partition_by: rule of the partition key; by default the bridge's.
            failure_policy: `halt`, `dead_letter` or `skip`; by default the bridge's.
            transactional: run the handler in a transaction together with the mark that it is done; the
                session is `change.session`.
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
        }

        def decorate(function: Function) -> Any:
            return self._register(function, sources, arguments, task_options)

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
            **{"database": self._given.get("database", DEFAULT_DATABASE), **options},
        )
        if watch:
            self.on_change(
                namespace,
                name=handler_name(namespace),
                operations=OPERATIONS,
                fields=FIELDS,
                match=STILL_PENDING,
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
        check_function(function, bind=bool(task_options.get("bind")))  # before its name is asked for
        make = partial(
            make_handler,
            function,
            sources,
            task_name=_task_name(self._app, function),
            arguments=arguments,
            task_options=task_options,
        )
        handler = self._judged(make)
        known = self._handlers.get(handler.name)
        if known is not None and not handler.is_same_code(known):
            raise ConfigurationError(
                f"bridge {self.name} already has a handler named {handler.name!r} ({known.task_name}); give one "
                "another name with name='...'.",
            )
        self._refuse_shared_task(handler)
        self._handlers[handler.name] = handler
        if self._app is not None:
            return make_task(self, self._app, handler, dict(task_options))
        self._waiting.append(lambda app: make_task(self, app, handler, dict(task_options)))
        return Proxy(lambda: self.app.tasks[handler.task_name])

    def _judged(self, make: Callable[[BridgeOptions], Handler]) -> Handler:
        """Judge by the options; the app's settings are read now only if a refusal could depend on them."""
        known = self._options or self._early
        if known is None:
            return make(self.options)
        try:
            return make(known)
        except ConfigurationError:
            if self._options is not None or self._app is None:
                raise
            return make(self.options)

    def _refuse_shared_task(self, handler: Handler) -> None:
        """Celery keeps the first task of a name: a second subscription would run the first one's function."""
        bridges = bridges_by_name(self._app).values() if self._app is not None else [self]
        for bridge in bridges:
            for other in bridge.handlers:
                if other.task_name == handler.task_name and (bridge is not self or other.name != handler.name):
                    raise ConfigurationError(
                        f"handlers {other.name!r} of bridge {bridge.name} and {handler.name!r} of bridge {self.name} "
                        f"would share the Celery task {handler.task_name}; give each a function with its own name.",
                    )

    def _of_process(self) -> tuple[int, MongoClient[dict[str, Any]], WorkerSide]:
        process = self._process
        if process is None or process[0] != os.getpid():
            with self._lock:
                if self._process is None or self._process[0] != os.getpid():
                    client = self._connect()
                    self._process = (os.getpid(), client, WorkerSide(client, self.options))
                process = self._process
        return process

    def _connect(self) -> MongoClient[dict[str, Any]]:
        keep_commands_out_of_logs()
        try:
            return MongoClient(self.url, **_client_options(_url_options(self.url)))
        except (InvalidURI, ClientConfigurationError, ValueError) as error:
            raise ConfigurationError(f"the MongoDB URL of bridge {self.name} is not valid: {short(error)}") from None


def _packages(app: Celery) -> list[str]:
    """Packages of the modules that the app includes: a module named `changes` may stand beside them."""
    modules = (*(app.conf.include or ()), *(app.conf.imports or ()))
    return sorted({package for package in (module.rpartition(".")[0] for module in modules) if package})


def _settings(app: Celery) -> dict[str, Any]:
    """Our settings; keys read with a namespace, such as Django's `CELERY`, keep it and are in capitals."""
    keys = [key for key in app.conf if isinstance(key, str)]
    namespace: str = app.conf.prefix or ""
    found = {}
    for key in keys:
        name = key.removeprefix(namespace).lower() if namespace and key.startswith(namespace) else key
        if name.startswith(SETTING_PREFIX):
            found[name.removeprefix(SETTING_PREFIX)] = app.conf[key]
    return found


def _url_options(url: str) -> set[str]:
    query = url.partition("?")[2]
    return {part.partition("=")[0].lower() for part in query.split("&") if part}


def _client_options(given: set[str]) -> Any:
    return {name: value for name, value in _CLIENT_DEFAULTS.items() if name not in given}


def _path(url: str) -> str | None:
    path = url.partition("://")[2].partition("/")[2].partition("?")[0]
    return path or None


def _task_name(app: Celery | None, function: Function) -> str:
    name = getattr(function, "__name__", "handler")
    module = getattr(function, "__module__", "")
    return app.gen_task_name(name, module) if app is not None else f"{module}.{name}"
