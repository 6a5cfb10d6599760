"""The MongoDB clients of a bridge: its defaults, and their end after the bridge is garbage-collected."""

from __future__ import annotations

import _thread
import contextlib
import os
import weakref
from typing import Any

import pymongo
from bson.raw_bson import RawBSONDocument
from pymongo import AsyncMongoClient, MongoClient

from mongo_celery.bridge.event_loop import EVENT_LOOP
from mongo_celery.bridge.raw_event import EVENT_TYPES
from mongo_celery.mongo.redaction import keep_commands_out_of_logs

_CLOSING_SECONDS = 1.0

_CLIENT_DEFAULTS: dict[str, Any] = {
    "appname": "mongo_celery",
    "connecttimeoutms": 2000,  # also for name servers, and until a frozen primary is noticed
    "heartbeatfrequencyms": 2000,
    "serverselectiontimeoutms": 30_000,  # longer than an election: shorter operations have their own limit
    "datetime_conversion": "DATETIME_AUTO",  # the year 10000 must not block a partition
}

_EVENT_TYPES: dict[str, Any] = {
    "document_class": RawBSONDocument,
    "uuidrepresentation": "unspecified",
    "unicode_decode_error_handler": EVENT_TYPES.unicode_decode_error_handler,
    "datetime_conversion": "DATETIME_MS",
    "tz_aware": False,
}
"""`EVENT_TYPES` as options of a client."""


def open_client(owner: weakref.ref[Any], url: str) -> MongoClient[dict[str, Any]]:
    """Open a client that closes when its owner is garbage-collected."""
    client: MongoClient[dict[str, Any]] = MongoClient(url, **_make_options(url))
    found = owner()
    assert found is not None, "it asks for its client"
    weakref.finalize(found, _close_elsewhere, client, os.getpid()).atexit = False  # its server may be gone by then
    return client


def open_async_client(owner: object, url: str) -> AsyncMongoClient[dict[str, Any]]:
    """Open a client for coroutine handlers, like `open_client`. It belongs to their event loop."""
    client: AsyncMongoClient[dict[str, Any]] = AsyncMongoClient(url, **_make_options(url))
    weakref.finalize(owner, _close_elsewhere, client, os.getpid()).atexit = False
    return client


def open_stream_client(url: str, timeout: float) -> MongoClient[RawBSONDocument]:
    """
    Open a client for one change stream, with a socket timeout in seconds. It does not repeat reads.

    It reads events by `EVENT_TYPES`. Types in the URL are for handlers.
    """
    # A shorter timeout in the URL would end each wait for an event. Only the reader reopens the stream.
    options = {"sockettimeoutms": int(timeout * 1000), "timeoutms": None, "retryreads": False}
    return MongoClient(url, **{**_make_options(url), **options, **_EVENT_TYPES})


def _close_elsewhere(client: MongoClient[Any] | AsyncMongoClient[Any], pid: int) -> None:
    """
    Close a client after the garbage collector has removed its bridge.

    A new thread closes it. The collector may have interrupted a thread that holds a lock of this client, such as its
    monitor, and would wait for it forever. A forked child does not touch its parent's clients.
    """
    if pid == os.getpid():
        with contextlib.suppress(RuntimeError):  # the interpreter is shutting down
            _thread.start_new_thread(_close, (client,))  # `threading` would wait for its thread to start


def _close(client: MongoClient[Any] | AsyncMongoClient[Any]) -> None:
    """Close a client without waiting long for a server that may be gone."""
    with contextlib.suppress(Exception), pymongo.timeout(_CLOSING_SECONDS):
        if isinstance(client, AsyncMongoClient):
            EVENT_LOOP.get().run(client.close)
        else:
            client.close()


def _make_options(url: str) -> Any:
    """Return the bridge's defaults for options that are not in the URL. Commands stay out of the logs."""
    keep_commands_out_of_logs()
    given = {part.partition("=")[0].lower() for part in url.partition("?")[2].split("&")}
    return {name: value for name, value in _CLIENT_DEFAULTS.items() if name not in given}
