"""`mongo-celery services`: the servers alone, for development."""

from __future__ import annotations

import threading
from pathlib import Path

import click

_PORT = click.IntRange(1, 65535)

_EXAMPLE = """\
To try it, put this into shop.py:

    from celery import Celery
    from mongo_celery import Bridge

    app = Celery("shop", broker="{redis}")
    bridge = Bridge(app, "{mongo}", name="shop")

    @bridge.on_change("shop.orders")
    def show(change):
        print(change.operation_type, change.full_document)

and start, in the same directory, each in a terminal of its own:

    celery -A shop listener
    celery -A shop worker --loglevel INFO

Then write something:

    python -c "import pymongo; pymongo.MongoClient('{mongo}').shop.orders.insert_one({{'customer': 'Ada'}})"
"""


@click.command("services")
@click.option("--mongo-port", type=_PORT, help="MongoDB's port; by default a free one.")
@click.option("--redis-port", type=_PORT, help="Redis's port; by default a free one.")
@click.option(
    "--directory",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where to keep the data and the ports; by default a temporary directory that is removed in the end.",
)
def services(mongo_port: int | None, redis_port: int | None, directory: Path | None) -> None:
    """
    Start a MongoDB replica set and Redis, print their URLs, and end them on Ctrl-C.

    They listen on 127.0.0.1 only, without passwords: for development, not for production.
    """
    from mongo_celery.embedded import MongoReplicaSet, RedisServer, find_binary
    from mongo_celery.embedded.ending import ended_by_signals

    under = (directory / "mongodb", directory / "redis") if directory else (None, None)
    find_binary("redis-server")  # said before three seconds are spent on the other one
    with ended_by_signals():
        click.echo("Starting MongoDB and Redis ...", err=True)
        with (
            MongoReplicaSet(port=mongo_port, directory=under[0]) as mongo,
            RedisServer(port=redis_port, directory=under[1], appendonly=directory is not None) as broker,
        ):
            click.echo(f"MongoDB  {mongo.url}\nRedis    {broker.url}\n")
            click.echo(_EXAMPLE.format(mongo=mongo.url, redis=broker.url))
            click.echo("Ctrl-C ends both.")
            threading.Event().wait()
    click.echo("Ended.", err=True)
