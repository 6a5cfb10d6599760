"""What `docs/snapshots.md` needs, and what its handler must do with a document that was there before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mongo_celery import Change, Fence


@contextmanager
def prepared(mongo_url: str, redis_url: str) -> Iterator[dict[str, Any]]:
    """Nothing; its bridge begins with a snapshot, and an order that existed has its summary."""
    del mongo_url, redis_url
    namespace: dict[str, Any] = {}
    yield namespace
    bridge = namespace["bridge"]
    (handler,) = bridge.handlers
    assert handler.begins_with_snapshot(bridge.options)
    client = bridge.client
    order = {"_id": 1, "total": 5}
    fence = Fence("shop/summarise", 0, 0, 1)
    namespace["summarise"](Change.build("snapshot", ns="shop.orders", full_document=order, fence=fence, client=client))
    found = client.shop.order_summaries.find_one({"_id": 1})
    assert found is not None
    assert found["total"] == 5
    client.close()
