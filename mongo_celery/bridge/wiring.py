"""
The context of all parts of a bridge: app, options, handlers, and the clients of one process.

Parts take the wiring, never the `Bridge`: that is what users see of it, and it is above all parts.
"""

from __future__ import annotations

import _thread
import contextlib
import logging
import os
import weakref
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import pymongo
from bson.raw_bson import RawBSONDocument
from celery import Celery
from pymongo import MongoClient
from pymongo.collection import Collection
from pymongo.errors import ConfigurationError as ClientConfigurationError
from pymongo.errors import InvalidURI, PyMongoError
from pymongo.uri_parser import parse_uri

from mongo_celery.app import Registry, app_name
from mongo_celery.arguments import NAME, nearest
from mongo_celery.bridge.handlers import Handler
from mongo_celery.bridge.options import OPTION_NAMES, SETTING_PREFIX, BridgeOptions, early, merge_options
from mongo_celery.bridge.raw_event import EVENT_TYPES
from mongo_celery.bridge.state.store import Store
from mongo_celery.bridge.stream.source import Scope, Selector, make_scope, resolve_selectors
from mongo_celery.bridge.view import AppOutboxes, HandlerView
from mongo_celery.command_line import CommandLine
from mongo_celery.errors import ConfigurationError
from mongo_celery.forking import PerProcess, per_process
from mongo_celery.mongo.opening import ping, to_user_error
from mongo_celery.mongo.redaction import keep_commands_out_of_logs, short
from mongo_celery.mongo.verdicts import ErrorContext
from mongo_celery.outbox import Outbox
from mongo_celery.outbox.idempotency import IDEMPOTENCY_STORES, IdempotencyStore
from mongo_celery.twophase.twophase import TWO_PHASE_COMMITS, TwoPhaseCommit

logger = logging.getLogger("mongo_celery.listener")

T = TypeVar("T")

UNNAMED = "(unnamed)"

_EVENT_TYPES: dict[str, Any] = {
    "document_class": RawBSONDocument,
    "uuidrepresentation": "unspecified",
    "unicode_decode_error_handler": EVENT_TYPES.unicode_decode_error_handler,
    "datetime_conversion": "DATETIME_MS",
    "tz_aware": False,
}
"""`EVENT_TYPES` as options of a client."""

_SETTINGS = (*OPTION_NAMES, "database_url")
_CLOSING_SECONDS = 1.0
_CHANGED_ELSEWHERE = ("_url", "_options", "_handlers", "_parts", "_per_process")
"""The attributes of a `Wiring` that belong to one cluster."""

_CLIENT_DEFAULTS: dict[str, Any] = {
    "appname": "mongo_celery",
    "connecttimeoutms": 2000,  # also bounds how long a frozen primary goes unnoticed
    "heartbeatfrequencyms": 2000,
    "serverselectiontimeoutms": 30_000,  # outlasts an election; what has to end sooner has a limit of its own
    "datetime_conversion": "DATETIME_AUTO",  # a year 10000 must not stop a partition
}

BRIDGES: Registry[Wiring] = Registry(
    "bridge",
    create="mongo_celery.Bridge(app, 'mongodb://...') where the app is made",
    rename="give this one another name",
)
"""Of all apps."""


class Wiring:
    """
    One bridge as its own parts see it. Thread-safe; nothing connects before it is needed.

    Attributes:
        given: the options as given, without the name.
        given_name: the bridge's name as given; None where it is the app's.
        bound: the Celery app; None for one that only knows what was declared before there is an app.
        public: the `Bridge` in that app, which its tasks have as `self.bridge`; the bridge's parts do without.
        outboxes: of the bridge in that app, by their names.

    Args:
        name: of the bridge; None for the app's own.
        url: of MongoDB; None for the app's setting.
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
        self._parts: dict[object, PerProcess[Any]] = {}
        self._clients_elsewhere: dict[str, PerProcess[MongoClient[dict[str, Any]]]] = {}

    def __repr__(self) -> str:
        return f"<Wiring of bridge {self.name}>"

    def of(self, app: Celery) -> Wiring:
        """The same bridge in an app, without handlers yet; the app does not know of it."""
        wiring = Wiring(self.given_name, self._url, self.given)
        wiring.bound = app
        return wiring

    # -- what was configured -----------------------------------------------------------------------

    @property
    def name(self) -> str:
        """
        Of the bridge: its own, or the app's; `UNNAMED` while neither a name nor an app was given.

        Raises:
            ConfigurationError: no name was given, and the app's own cannot serve.
        """
        if self.given_name is not None:
            return self.given_name
        if self.bound is None:
            return UNNAMED
        name = app_name(self.bound)
        if name is None or not NAME.fullmatch(name):
            raise ConfigurationError(
                f"the app's own name, {self.bound.main!r}, cannot name its bridge; give Bridge a name='...' of "
                "letters, digits, '_' and '-', which no other app on this MongoDB or broker uses, and keep it: the "
                "positions are stored under it.",
            )
        return name

    @property
    def app(self) -> Celery:
        """The Celery app."""
        if self.bound is None:
            raise ConfigurationError(f"bridge {self.name} has no app yet; pass one, or call init_app(app).")
        return self.bound

    @property
    def options(self) -> BridgeOptions:
        """The validated options, settings included; reading them loads the app's configuration."""
        if self._options is None:
            self._options = merge_options({**self.given, "name": self.name}, _settings(self.app))
        return self._options

    def build_with_options(self, make: Callable[[BridgeOptions], T]) -> T:
        """Build with the options known so far; load the app's settings only if validation failed without them."""
        try:
            return make(self._options or self._early or self.options)
        except ConfigurationError:
            return make(self.options)

    @property
    def handlers(self) -> list[Handler]:
        """The registered handlers, in the order of their names."""
        return [self._handlers[name] for name in sorted(self._handlers)]

    def task_name(self, handler: str) -> str:
        """Return the name of the Celery task of one of its handlers."""
        return self._handlers[handler].task_name

    @property
    def groups(self) -> list[str | None]:
        """The groups that handlers are in, in the order of their names; None, which is first, means no group."""
        used = {handler.group for handler in self._handlers.values()} or {None}
        return sorted(used, key=lambda group: group or "")

    @property
    def queue_names(self) -> list[str]:
        """The queues of all its groups."""
        return [queue for group in self.groups for queue in self.options.queue_names(group)]

    def add(self, handler: Handler) -> None:
        """
        Register a handler, or once more the same one.

        Raises:
            ConfigurationError: there is another one of its name, or its task belongs to another subscription.
        """
        known = self._handlers.get(handler.name)
        if known is not None and not handler.is_same(known):
            raise ConfigurationError(
                f"bridge {self.name} already has a handler named {handler.name!r} ({known.task_name}); "
                f"{handler.name_fix(known)}.",
            )
        self._refuse_shared_task(handler)
        self._handlers[handler.name] = handler

    @contextlib.contextmanager
    def keep_handlers_on_error(self) -> Iterator[None]:
        """Register no handler of a block that raises."""
        before = {**self._handlers}
        try:
            yield
        except BaseException:
            self._handlers = before
            raise

    def _refuse_shared_task(self, handler: Handler) -> None:
        """Celery keeps the first task of a name: a second subscription would run the first one's function."""
        others = BRIDGES.of(self.bound) if self.bound is not None else []
        for bridge in [self, *(other for other in others if other is not self)]:
            for other in bridge.handlers:
                if other.task_name == handler.task_name and (bridge is not self or other.name != handler.name):
                    raise ConfigurationError(
                        f"handlers {other.name!r} of bridge {bridge.name} and {handler.name!r} of bridge {self.name} "
                        f"would share the Celery task {handler.task_name}; give each a function with its own name.",
                    )

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
                return self.url.partition("://")[2].partition("/")[2].partition("?")[0] or None
            database: str | None = parse_uri(self.url, validate=False)["database"]
            return database
        except (InvalidURI, ClientConfigurationError, ValueError) as error:
            raise self._bad_url(error) from None

    def stream(self, without: Container[str] = ()) -> tuple[list[Selector], Scope]:
        """
        Return the selector of each handler, in their order, and the one stream that serves them all.

        Args:
            without: names of handlers to leave out.

        Raises:
            ConfigurationError: a source, or an option of the stream, cannot work.
        """
        options = self.options
        selectors = [
            handler.selector(self.default_database) for handler in self.handlers if handler.name not in without
        ]
        bookkeeping = AppOutboxes(self.app).bookkeeping()
        if any(source.collection is None for selector in selectors for source in selector.sources):
            bookkeeping = replace(bookkeeping, collections=bookkeeping.collections | _own_collections(self.app))
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

    # -- what this process has ---------------------------------------------------------------------

    @per_process
    def client(self) -> MongoClient[dict[str, Any]]:
        """This process's client: connects lazily, and is made anew after a fork."""
        keep_commands_out_of_logs()
        try:
            return _open_client(weakref.ref(self), self.url)
        except (InvalidURI, ClientConfigurationError, ValueError) as error:
            raise self._bad_url(error) from None

    @per_process
    def store(self) -> Store:
        """The bridge's state, by this process's client."""
        return Store(self.client, self.options)

    @property
    def line(self) -> CommandLine:
        """The beginning of the commands about this bridge, for a process that was not given `-A`."""
        several = self.bound is not None and len(BRIDGES.of(self.bound)) > 1
        return CommandLine.of(self.bound, self.name if several else None)

    @property
    def state_concern(self) -> ErrorContext:
        """Whom an error of the state database concerns, for the sentences about it."""
        return ErrorContext(
            f"the state database {self.options.database} of bridge {self.name}",
            f"readWrite there, or the role that {self.line.changes('grants')} prints",
        )

    def reach(self) -> MongoClient[dict[str, Any]]:
        """
        This process's client for one command, after the primary has answered once.

        Raises:
            ServerUnavailableError: no primary answered within `ANSWER_SECONDS`.
            AccessError: the login was refused.
            ConfigurationError: the URL is not valid.
        """
        client = self.client
        try:
            ping(client)
        except PyMongoError as error:
            raise to_user_error(error, self.state_concern) from error
        return client

    def of_process(self, make: Callable[[Wiring], T]) -> T:
        """Return a part's value for this process: made at its first use, and anew after a fork."""
        part: PerProcess[T] | None = self._parts.get(make)
        if part is None:
            part = self._parts.setdefault(make, PerProcess(partial(make, self)))
        return part.get()

    def stream_client(self, timeout: float) -> MongoClient[RawBSONDocument]:
        """
        A client of its own for one change stream, with a socket timeout in seconds; it repeats no reads.

        It reads events by `EVENT_TYPES`, whatever the URL says of types: that is meant for handlers.
        """
        keep_commands_out_of_logs()
        options = _client_options(self.url)
        # A shorter time of the URL would end each wait for an event. The reader alone opens the stream again.
        options |= {"sockettimeoutms": int(timeout * 1000), "timeoutms": None, "retryreads": False}
        return MongoClient(self.url, **{**options, **_EVENT_TYPES})

    def collection(self, namespace: str) -> Collection[dict[str, Any]]:
        """A collection of the bridge's cluster by `"db.collection"`, or `"collection"` of the URL's database."""
        database, dot, name = namespace.partition(".")
        if not dot:
            default = self.default_database
            if default is None:
                raise ConfigurationError(f"{namespace!r} names no database; write 'db.{namespace}'.")
            database, name = default, namespace
        return self.client[database][name]

    @contextlib.contextmanager
    def elsewhere(
        self, url: str, change: Callable[[BridgeOptions, Handler], Handler], **options: Any
    ) -> Iterator[BridgeOptions]:
        """
        Until the end of the block, and for a test alone, the bridge works on another cluster, with other options.

        What this process has made for it is put away meanwhile. Clients stay open as long as the bridge is there:
        whoever was given one, such as an outbox of the bridge, keeps it for longer than a block.

        Args:
            url: of the cluster.
            change: gives a handler as it is to be meanwhile, from the options of the block and the handler.
            options: in the place of those in force.
        """
        kept = {name: self.__dict__.get(name, {}) for name in _CHANGED_ELSEWHERE}
        changed = replace(self.options, **options)
        client = self._clients_elsewhere.setdefault(url, PerProcess(partial(_open_client, weakref.ref(self), url)))
        self.__dict__.update(
            _url=url,
            _options=changed,
            _handlers={name: change(changed, handler) for name, handler in self._handlers.items()},
            _parts={},
            _per_process={"client": client},
        )
        try:
            yield changed
        finally:
            self.__dict__.update(kept)

    def _bad_url(self, error: Exception) -> ConfigurationError:
        return ConfigurationError(f"the MongoDB URL of bridge {self.name} is not valid: {short(error)}")


def _own_collections(app: Celery) -> set[str]:
    """Return the collections of `once` and of two-phase commit, which a source that names none of them leaves out."""
    found: set[str] = set()
    keepers: list[IdempotencyStore | TwoPhaseCommit] = [*IDEMPOTENCY_STORES, *TWO_PHASE_COMMITS.of(app)]
    for keeper in keepers:
        try:
            found.update(keeper.full_names)
        except Exception as error:  # noqa: BLE001 - a user's function may raise whatever it likes
            logger.warning(
                "the collection of %r cannot be opened (%s): handlers run for its bookkeeping, too",
                keeper,
                short(error),
                extra={"event": "bookkeeping_unknown"},
            )
    return found


def _open_client(wiring: weakref.ref[Wiring], url: str) -> MongoClient[dict[str, Any]]:
    """Open a client that is closed when its bridge is gone."""
    client: MongoClient[dict[str, Any]] = MongoClient(url, **_client_options(url))
    owner = wiring()
    assert owner is not None, "it asks for its client"
    weakref.finalize(owner, _close_elsewhere, client, os.getpid()).atexit = False  # its server may be gone by then
    return client


def _close_elsewhere(client: MongoClient[dict[str, Any]], pid: int) -> None:
    """
    Close a client of which the garbage collector has found that its bridge is gone.

    By a thread of its own: the collector may have interrupted one that holds a lock of this very client, such as its
    monitor, and would wait for it for ever. A child leaves what its parent has made to the parent.
    """
    if pid == os.getpid():
        with contextlib.suppress(RuntimeError):  # the interpreter ends
            _thread.start_new_thread(_close, (client,))  # one of `threading` is waited for when it starts


def _close(client: MongoClient[dict[str, Any]]) -> None:
    """Without waiting long for a server that may be gone."""
    with contextlib.suppress(Exception), pymongo.timeout(_CLOSING_SECONDS):
        client.close()


def _settings(app: Celery) -> dict[str, Any]:
    """Our settings; keys read with a namespace, such as Django's `CELERY`, keep it and are in capitals."""
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


def _client_options(url: str) -> Any:
    """Return our defaults, but for the options that the URL has."""
    given = {part.partition("=")[0].lower() for part in url.partition("?")[2].split("&")}
    return {name: value for name, value in _CLIENT_DEFAULTS.items() if name not in given}
