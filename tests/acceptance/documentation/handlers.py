"""Prepare `docs/handlers.md`, and check what its handlers do with a change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pymongo import MongoClient

from mongo_celery import Bridge
from mongo_celery.testing import BridgeRunner
from tests.acceptance.documentation.shop import open_shop


@contextmanager
def prepared(mongo_url: str, redis_url: str) -> Iterator[dict[str, Any]]:
    """Yield the app and the bridge of the README."""
    with open_shop(mongo_url, redis_url) as (namespace, client):
        yield namespace

        bridge = namespace["bridge"]
        names = {handler.name for handler in bridge.handlers}
        assert names == {"bill", "send_invoice", "mirror_order"}, names
        assert namespace["bill"].max_retries == 5
        namespace["client"].close()
        _mirrors(bridge, client, mongo_url)


def _mirrors(bridge: Bridge, client: MongoClient[dict[str, Any]], mongo_url: str) -> None:
    """Of each tenant in its own database, and of nothing else."""
    tenants = client.tenant_ann, client.tenant_bob
    with BridgeRunner(bridge, url=mongo_url) as runner:
        for tenant in tenants:
            tenant.orders.insert_one({"_id": 1, "of": tenant.name})
            tenant.other.insert_one({"_id": 2})
        delivered = runner.deliver()
    assert [call.handler for call in delivered.calls] == ["mirror_order"] * 2
    for tenant in tenants:
        assert [*tenant.order_mirrors.find({}, {"_fence": 0})] == [{"_id": 1, "of": tenant.name}]
        client.drop_database(tenant.name)
