"""An outbox on RabbitMQ: its confirms, its queues and its refusals, with a server that is killed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kombu import Connection, Exchange, Queue
from pymongo import MongoClient

from mongo_celery import Event
from tests.acceptance.outbox_project import EFFECT
from tests.acceptance.outbox_rig import Shop
from tests.fixtures.process import Processes, wait_for
from tests.fixtures.rabbitmq import RabbitCluster, RabbitNode

Document = dict[str, Any]
KEYS = [f"key{number}" for number in range(8)]


@pytest.fixture
def node(processes: Processes, tmp_path: Path) -> RabbitNode:
    directory = tmp_path / "rabbitmq"
    directory.mkdir()
    (node,) = RabbitCluster(processes, directory, 1).nodes
    return node


@pytest.fixture
def shop(mongo_client: MongoClient[Document], mongo_url: str, tmp_path: Path, node: RabbitNode) -> Iterator[Shop]:
    directory = tmp_path / "shop"
    directory.mkdir()
    with Shop(Processes(directory), mongo_client, mongo_url, node.url, at_once=True) as made:
        yield made


def write_on(shop: Shop, *ns: int) -> None:
    for n in ns:
        for key in KEYS:
            assert shop.add(key, n)


@pytest.mark.slow
def test_a_server_that_is_killed_loses_nothing_and_changes_no_order(shop: Shop, node: RabbitNode) -> None:
    """Killed in the middle of the writes, twice; these go on, and what it has confirmed it has, too."""
    shop.consume()
    for key in KEYS:
        shop.insert(key, 1, 2)
    wait_for(lambda: len(shop.effects()) == len(KEYS))
    for first in (10, 20):
        write_on(shop, first, first + 1)
        node.kill()
        write_on(shop, first + 2, first + 3)
        wait_for(lambda: shop.outbox.status().dispatcher.broker_down)
        assert shop.pending()
        node.start()
        write_on(shop, first + 4)
        shop.settle()


@pytest.mark.slow
def test_a_refusal_stops_its_own_document_and_events_reach_their_queues(shop: Shop, node: RabbitNode) -> None:
    """A queue that is there with other arguments (406) is the entry's own fault; it is tried again when it is gone."""
    with Connection(node.url) as connection:
        channel = connection.default_channel
        events = Queue("readers", Exchange("mongo_celery.events", type="topic"), routing_key="order.*")(channel)
        events.declare()
        Queue("odd", max_length=5)(channel).declare()

        odd = shop.writer.signature(EFFECT, args=("odd", 1)).set(queue="odd")
        shop.outbox.insert_one({"_id": "odd", "ns": [1]}, tasks=[odd])
        placed = [Event("order.placed", {"n": 1}), Event("parcel.sent", {"n": 2})]
        shop.outbox.insert_one({"_id": "plain", "ns": [1]}, tasks=[shop.effect("plain", 1)], events=placed)
        wait_for(lambda: shop.outbox.status().documents == 1)
        shop.outbox.sweep(older_than=0)
        assert (shop.outbox.status().failing, shop.outbox.status().pending) == (1, 1)

        message = wait_for(lambda: events.get(no_ack=True))
        event = json.loads(message.body or "")
        assert (event["type"], event["data"], message.content_type) == ("order.placed", {"n": 1}, "application/json")
        assert events.get(no_ack=True) is None
        Queue("odd")(channel).delete()
    shop.consume("sweeps", "effects", "odd")
    shop.settle()
