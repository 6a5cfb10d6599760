"""
The context of all parts of a bridge: app, options, handlers and this process's clients.

Parts use the wiring, never the `Bridge`, which is the public view above all parts.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from bson.raw_bson import RawBSONDocument
from celery import Celery
from pymongo import AsyncMongoClient, MongoClient
from pymongo.collection import Collection
from pymongo.errors import ConfigurationError as ClientConfigurationError
from pymongo.errors import InvalidURI, PyMongoError
from pymongo.uri_parser import parse_uri

from mongo_celery.app import Registry, app_name
from mongo_celery.arguments import NAME, nearest
from mongo_celery.bridge.clients import open_async_client, open_client, open_stream_client
from mongo_celery.bridge.handlers import Handler
from mongo_celery.bridge.options import OPTION_NAMES, SETTING_PREFIX, BridgeOptions, early, merge_options
from mongo_celery.bridge.state.store import Store
from mongo_celery.bridge.stream.source import Scope, Selector, make_scope, resolve_selectors
from mongo_celery.bridge.view import AppOutboxes, HandlerView
from mongo_celery.command_line import CommandLine
from mongo_celery.errors import ConfigurationError
from mongo_celery.forking import PerProcess, per_process
from mongo_celery.mongo.opening import find_collection, ping, to_user_error
from mongo_celery.mongo.redaction import short
from mongo_celery.mongo.verdicts import ErrorContext, is_unresolved
from mongo_celery.outbox import Outbox

T = TypeVar("T")

UNNAMED = "(unnamed)"

_SETTINGS = (*OPTION_NAMES, "database_url")
_CHANGED_ELSEWHERE = ("_url", "_options", "_handlers", "_per_process")
"""The attributes of a `Wiring` that differ in another cluster."""

BRIDGES: Registry[Wiring] = Registry(
    "bridge",
    create="mongo_celery.Bridge(app, 'mongodb://...') where the app is made, or call your bridge's init_app(app)",
    rename="give this one another name",
)
"""The bridges of all apps."""


class Wiring:
    """
    A bridge as its parts see it. Thread-safe. It connects at first use.

    Attributes:
        given: the options as given, without the name.
        given_name: the bridge's name as given. None for the app's name.
        bound: the Celery app. None for declarations without an app.
        public: the `Bridge` in that app, which tasks see as `self.bridge`. The bridge's parts do not use it.
        outboxes: the outboxes of the bridge in that app, by their names.

    Args:
        name: name of the bridge. None for the app's own.
        url: URL of MongoDB. None for the app's setting.
        given: the options as given.

    Raises:
        ConfigurationError: an option cannot work.
    """

    def __init__(self, name: str | None, url: str | None, given: Mapping[str, Any]) -> None:
        self.given_name = name
        self.given = given
        self.bound: Celery | None = None
        self.public: Any = None
        self.outboxes: dict[str, Outbox] = {}
        self._app_outboxes: AppOutboxes | None = None
        self._url = url
        self._early = early(given if name is None else {"name": name, **given})
        self._options: BridgeOptions | None = None
        self._handlers: dict[str, Handler] = {}
        self._clients_elsewhere: dict[str, PerProcess[MongoClient[dict[str, Any]]]] = {}

    def __repr__(self) -> str:
        return f"<Wiring of bridge {self.name}>"

    def of(self, app: Celery) -> Wiring:
        """Return the same bridge in another app, without handlers. The app is not informed."""
        wiring = Wiring(self.given_name, self._url, self.given)
        wiring.bound = app
        return wiring

    # -- configuration -------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """
        The bridge's own name, or the app's. `UNNAMED` while it has neither.

        Raises:
            ConfigurationError: no name was given, and the app's name is not valid.
        """
        if self.given_name is not None:
            return self.given_name
        if self.bound is None:
            return UNNAMED
        name = app_name(self.bound)
        if name is None or not NAME.fullmatch(name):
            raise ConfigurationError(
                f"the app's name {self.bound.main!r} cannot be the name of its bridge. Use Bridge(..., name='...') "
                "with letters, digits, '_' and '-', and a name that no other app on this MongoDB or broker uses. Do "
                "not change it later, because positions are stored under it.",
            )
        return name

    @property
    def app(self) -> Celery:
        """The Celery app."""
        if self.bound is None:
            raise ConfigurationError(f"bridge {self.name} has no app yet. Use Bridge(app, ...), or call init_app(app).")
        return self.bound

    @property
    def options(self) -> BridgeOptions:
        """The validated options, settings included. Reading them loads the app's configuration."""
        if self._options is None:
            self._options = merge_options({**self.given, "name": self.name}, _settings(self.app))
        return self._options

    def build_with_options(self, make: Callable[[BridgeOptions], T]) -> T:
        """Build from the options known so far. Load the app's settings only if validation fails without them."""
        try:
            return make(self._options or self._early or self.options)
        except ConfigurationError:
            return make(self.options)

    @property
    def handlers(self) -> list[Handler]:
        """The registered handlers, in the order of their names."""
        return [self._handlers[name] for name in sorted(self._handlers)]

    def task_name(self, handler: str) -> str:
        """Return the name of a handler's Celery task."""
        return self._handlers[handler].task_name

    @property
    def groups(self) -> list[str | None]:
        """The groups of the handlers, in order. None comes first and means no group."""
        used = {handler.group for handler in self._handlers.values()} or {None}
        return sorted(used, key=lambda group: group or "")

    @property
    def queue_names(self) -> list[str]:
        """The queues of all its groups."""
        return [queue for group in self.groups for queue in self.options.queue_names(group)]

    def add(self, handler: Handler) -> None:
        """
        Register a handler. Registering the same one again is allowed.

        Raises:
            ConfigurationError: another one has its name, or its task belongs to another subscription.
        """
        known = self._handlers.get(handler.name)
        if known is not None and not handler.is_same(known):
            raise ConfigurationError(
                f"bridge {self.name} already has a handler named {handler.name!r} ({known.task_name}). "
                f"{handler.name_fix(known)}.",
            )
        self._refuse_shared_task(handler)
        self._handlers[handler.name] = handler

    @contextlib.contextmanager
    def keep_handlers_on_error(self) -> Iterator[None]:
        """Undo the registrations of the block if it raises."""
        before = {**self._handlers}
        try:
            yield
        except BaseException:
            self._handlers = before
            raise

    def _refuse_shared_task(self, handler: Handler) -> None:
        """Refuse a second subscription for one task name: Celery keeps the first task and would run its function."""
        others = BRIDGES.of(self.bound) if self.bound is not None else []
        for bridge in [self, *(other for other in others if other is not self)]:
            for other in bridge.handlers:
                if other.task_name == handler.task_name and (bridge is not self or other.name != handler.name):
                    raise ConfigurationError(
                        f"handlers {other.name!r} of bridge {bridge.name} and {handler.name!r} of bridge {self.name} "
                        f"would share the Celery task {handler.task_name}. Give each a function with a different name.",
                    )

    @property
    def url(self) -> str:
        """The MongoDB URL. It may carry a password: never log it."""
        url = self._url or self.app.conf.get(f"{SETTING_PREFIX}database_url")
        if not url:
            raise ConfigurationError(
                f"bridge {self.name} has no MongoDB URL. Use Bridge(app, url), or set mongo_celery_database_url.",
            )
        return str(url)

    @property
    def default_database(self) -> str | None:
        """The database in the URL. None if it has none."""
        try:
            if self.url.startswith("mongodb+srv"):  # parsing this URL queries the name server
                return self.url.partition("://")[2].partition("/")[2].partition("?")[0] or None
            database: str | None = parse_uri(self.url, validate=False)["database"]
            return database
        except (InvalidURI, ClientConfigurationError, ValueError) as error:
            raise self._bad_url(error) from None

    def stream(self, without: Container[str] = ()) -> tuple[list[Selector], Scope]:
        """
        Return the handlers' selectors, in order, and the one stream that serves them all.

        Args:
            without: names of handlers to leave out.

        Raises:
            ConfigurationError: a source, or an option of the stream, cannot work, or a handler has lost its task.
        """
        options = self.options
        for handler in self.handlers:
            if getattr(self.app.tasks[handler.task_name], "handler", None) is None:
                raise ConfigurationError(
                    f"The app has another Celery task named {handler.task_name}, and Celery keeps the first of two. So "
                    f"handler {handler.name!r} of bridge {self.name} would never run. Remove @app.task or @shared_task "
                    "from its function, or give the other task a name."
                )
        selectors = [
            handler.selector(self.default_database) for handler in self.handlers if handler.name not in without
        ]
        watches_databases = any(source.collection is None for selector in selectors for source in selector.sources)
        bookkeeping = AppOutboxes(self.app).bookkeeping(watches_databases=watches_databases)
        scope = make_scope(
            selectors,
            state_database=options.database,
            full_document=options.full_document,
            before_change=options.full_document_before_change,
            expanded=options.show_expanded_events,
            bookkeeping=bookkeeping,
        )
        return resolve_selectors(selectors, bookkeeping), scope

    def make_view(self, handler: Handler) -> HandlerView:
        """Return a handler's view of the fields that this package keeps in documents."""
        if self._app_outboxes is None:
            self._app_outboxes = AppOutboxes(self.app)
        return HandlerView(self._app_outboxes, handler.filter)

    # -- this process's clients and parts ------------------------------------------------------------

    @per_process
    def client(self) -> MongoClient[dict[str, Any]]:
        """
        This process's client. It connects at first use, and a forked process gets a new one.

        Raises:
            ConfigurationError: the URL is not valid.
            PyMongoError: no name server resolved the URL.
        """
        try:
            return open_client(weakref.ref(self), self.url)
        except (InvalidURI, ClientConfigurationError, ValueError) as error:
            if is_unresolved(error):
                raise
            raise self._bad_url(error) from None

    @per_process
    def async_client(self) -> AsyncMongoClient[dict[str, Any]]:
        """This process's client for coroutine handlers. It belongs to their event loop."""
        return open_async_client(self, self.url)

    @per_process
    def store(self) -> Store:
        """The bridge's state, read through this process's client."""
        return Store(self.client, self.options)

    @property
    def line(self) -> CommandLine:
        """The beginning of this bridge's commands for a process without `-A`."""
        several = self.bound is not None and len(BRIDGES.of(self.bound)) > 1
        return CommandLine.of(self.bound, self.name if several else None)

    @property
    def state_concern(self) -> ErrorContext:
        """The error context of the state database."""
        return ErrorContext(
            f"the state database {self.options.database} of bridge {self.name}",
            f"readWrite there, or a role that `{self.line.changes('grants')}` prints",
        )

    def reach(self) -> MongoClient[dict[str, Any]]:
        """
        Return this process's client for one command, after the primary has answered.

        Raises:
            ServerUnavailableError: no primary answered within `ANSWER_SECONDS`, or no name server.
            AccessError: the login was refused.
            ConfigurationError: the URL is not valid.
        """
        try:
            client = self.client
            ping(client)
        except PyMongoError as error:
            raise to_user_error(error, self.state_concern) from error
        return client

    def of_process(self, make: Callable[[Wiring], T]) -> T:
        """Return a part's value for this process. It is made at first use, and again after a fork."""
        parts: dict[object, PerProcess[T]] = self.__dict__.setdefault("_per_process", {})
        return (parts.get(make) or parts.setdefault(make, PerProcess(partial(make, self)))).get()

    def stream_client(self, timeout: float) -> MongoClient[RawBSONDocument]:
        """Return a new client for one change stream. See `open_stream_client`."""
        return open_stream_client(self.url, timeout)

    def collection(self, namespace: str) -> Collection[dict[str, Any]]:
        """Return a collection of the bridge's cluster: `"db.collection"`, or `"collection"` of the URL's database."""
        return find_collection(self.client, namespace)

    @contextlib.contextmanager
    def elsewhere(
        self, url: str, change: Callable[[BridgeOptions, Handler], Handler], **options: Any
    ) -> Iterator[BridgeOptions]:
        """
        In the block, use another cluster and other options. For tests only.

        The block hides the bridge's clients and parts of this process. New clients stay open as long as the bridge
        exists, because an outbox may keep one longer than the block.

        Args:
            url: URL of the cluster.
            change: returns the handler for the block, from the options of the block and the handler.
            options: options that replace the current ones.
        """
        kept = {name: self.__dict__.get(name, {}) for name in _CHANGED_ELSEWHERE}
        changed = replace(self.options, **options)
        client = self._clients_elsewhere.setdefault(url, PerProcess(partial(open_client, weakref.ref(self), url)))
        self.__dict__.update(
            _url=url,
            _options=changed,
            _handlers={name: change(changed, handler) for name, handler in self._handlers.items()},
            _per_process={"client": client},
        )
        try:
            yield changed
        finally:
            self.__dict__.update(kept)

    def _bad_url(self, error: Exception) -> ConfigurationError:
        return ConfigurationError(f"the MongoDB URL of bridge {self.name} is not valid: {short(error)}")


def _settings(app: Celery) -> dict[str, Any]:
    """Return the bridge's settings. A namespace, such as Django's `CELERY`, stays in the keys, in capitals."""
    keys = [key for key in app.conf if isinstance(key, str)]
    namespace: str = app.conf.prefix or ""
    found = {}
    for key in keys:
        is_upper = namespace and key.startswith(namespace)
        name = key.removeprefix(namespace).lower() if is_upper else key
        if not name.startswith(SETTING_PREFIX):
            continue
        option = name.removeprefix(SETTING_PREFIX)
        if option not in _SETTINGS:
            known = [SETTING_PREFIX + each for each in _SETTINGS]
            known = [f"{namespace}{each.upper()}" for each in known] if is_upper else known
            raise ConfigurationError(f"setting {key} is unknown{nearest(key, known)}.")
        found[option] = app.conf[key]
    return found
