"""Prepare `docs/throughput.md`, and check what its handlers do with a change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from pymongo import MongoClient

from mongo_celery import Change, Fence
from mongo_celery.bridge.change import ChangeFailed
from tests.acceptance.documentation.shop import open_shop


@contextmanager
def prepared(mongo_url: str, redis_url: str) -> Iterator[dict[str, Any]]:
    """Yield the app and the bridge of the README."""
    with open_shop(mongo_url, redis_url) as (namespace, client):
        yield namespace

        bridge = namespace["bridge"]
        names = {handler.name for handler in bridge.handlers}
        assert names == {"copy_orders", "announce", "index"}, names
        assert [handler.name for handler in bridge.handlers if handler.commits_inline(bridge.options)] == ["index"]
        _copies(namespace["copy_orders"], client)
        _announces(namespace)


def _copies(copy_orders: Any, client: MongoClient[dict[str, Any]]) -> None:
    fence = Fence("shop/copy_orders", 0, 0, 1)
    documents: list[Any] = [{"_id": 1, "n": 1}, {"_id": 2, "n": 1}, {"_id": 1, "n": 2}, None]
    keys = [1, 2, 1, 2]
    copy_orders(
        [
            Change.build(
                "delete" if document is None else "insert",
                ns="shop.orders",
                document_key={"_id": key},
                full_document=document,
                fence=fence,
                client=client,
            )
            for key, document in zip(keys, documents, strict=True)
        ]
    )
    assert list(client.shop.order_copies.find({}, {"_fence": 0})) == [{"_id": 1, "n": 2}]


def _announces(namespace: dict[str, Any]) -> None:
    published: list[Any] = []

    def publish(document: dict[str, Any]) -> None:
        if document["_id"] == 2:
            raise ConnectionResetError
        published.append(document["_id"])

    namespace["publish"] = publish
    changes = [Change.build("insert", ns="shop.orders", full_document={"_id": each}) for each in (1, 2, 3)]
    with pytest.raises(ChangeFailed) as failed:
        namespace["announce"](changes)
    assert isinstance(failed.value.__cause__, ConnectionResetError)
    assert (failed.value.place, published) == (1, [1])
