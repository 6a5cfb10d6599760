"""What `docs/scale.md` needs, and what its bridges and brokers must have been told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mongo_celery.bridge.wiring import BRIDGES


@contextmanager
def prepared(mongo_url: str, redis_url: str) -> Iterator[dict[str, Any]]:
    """Nothing."""
    del mongo_url, redis_url
    namespace: dict[str, Any] = {}
    yield namespace

    bridges = {wiring.name: wiring for wiring in BRIDGES.of(namespace["app"])}
    assert sorted(bridges) == ["shop_invoices", "shop_orders"], bridges
    assert {name: [each.name for each in wiring.handlers] for name, wiring in bridges.items()} == {
        "shop_orders": ["summarise"],
        "shop_invoices": ["book"],
    }
    with namespace["rabbit"].connection_for_write() as connection:
        assert connection.alt == ["amqp://rabbit1//", "amqp://rabbit2//", "amqp://rabbit3//"]
    assert namespace["rabbit"].amqp.queues["shop.0"].queue_arguments == {"x-queue-type": "quorum"}
    with namespace["watched"].connection_for_write() as connection:
        assert (connection.transport.driver_type, len(connection.alt)) == ("redis", 3)
        assert connection.transport_options["master_name"] == "main"
