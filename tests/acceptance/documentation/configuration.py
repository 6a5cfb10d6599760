"""What `docs/configuration.md` needs, and what its bridges must have been told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from celery import Celery

from mongo_celery import Bridge
from mongo_celery.bridge.wiring import BRIDGES


@contextmanager
def prepared(mongo_url: str, redis_url: str) -> Iterator[dict[str, Any]]:
    """An app."""
    del mongo_url
    app = Celery("small", broker=redis_url)
    yield {"app": app, "Bridge": Bridge}

    bridges = {wiring.name: wiring for wiring in BRIDGES.of(app)}
    assert sorted(bridges) == ["shop", "small"], bridges
    assert (bridges["shop"].options.partitions, bridges["small"].options.partitions) == (8, 8)
    assert bridges["shop"].options.claim_ttl == 20
    for bridge in bridges.values():
        bridge.client.admin.command("ping")
        bridge.client.close()
