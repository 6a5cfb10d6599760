"""The shop of the README, for pages whose blocks only name `app` and `bridge`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from celery import Celery
from pymongo import MongoClient

from mongo_celery import Bridge


@contextmanager
def open_shop(
    mongo_url: str, redis_url: str, **options: Any
) -> Iterator[tuple[dict[str, Any], MongoClient[dict[str, Any]]]]:
    """Yield the namespace of a page, with the app and the bridge, and a client for its checks."""
    app = Celery("shop", broker=redis_url)
    with MongoClient[dict[str, Any]](mongo_url, **options) as client:
        yield {"app": app, "bridge": Bridge(app, mongo_url, name="shop")}, client
