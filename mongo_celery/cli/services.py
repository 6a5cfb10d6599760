"""`mongo-celery services`: only the servers, for development."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from mongo_celery.cli.apps import say

_PORT = click.IntRange(1, 65535)

_NAMES: Mapping[str | None, str] = {"mongodb": "MongoDB", "redis": "Redis"}

_EXAMPLE = """\
To try it, write this into shop.py:

    from celery import Celery
    from mongo_celery import Bridge

    app = Celery("shop", broker="{redis}")
    bridge = Bridge(app, "{mongo}", name="shop")

    @bridge.on_change("shop.orders")
    def show(change):
        print(change.operation_type, change.full_document)

Start these in the same directory, each in another terminal:

    celery -A shop listener
    celery -A shop worker --loglevel INFO

Then write a document:

    python -c "import pymongo; pymongo.MongoClient('{mongo}').shop.orders.insert_one({{'customer': 'Ada'}})"
"""


@click.command("services", epilog="Example: mongo-celery services --directory ./data")
@click.option("--mongo-port", type=_PORT, help="The port of MongoDB. Default: a free port.")
@click.option("--redis-port", type=_PORT, help="The port of Redis. Default: a free port.")
@click.option(
    "--directory",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep the data and the ports in this directory. Default: a temporary directory, removed at the end.",
)
@click.option(
    "--only", type=click.Choice(["mongodb", "redis"]), help="Start only this server. You can then stop it alone."
)
@click.option(
    "--oplog-mb",
    type=click.IntRange(min=1),
    metavar="N",
    help="Size of MongoDB's oplog in megabytes, with a checkpoint each second. A small oplog rolls over soon, as in "
    "drills.",
)
@click.option("--json", "as_json", is_flag=True, help="Print only one JSON object, with the URLs.")
def services(
    mongo_port: int | None,
    redis_port: int | None,
    directory: Path | None,
    only: str | None,
    oplog_mb: int | None,
    as_json: bool,
) -> None:
    """
    Start a MongoDB replica set and Redis, print their URLs, and end them on Ctrl-C.

    The servers listen on 127.0.0.1 only, and have no passwords. Use them for development, not for production.
    """
    from contextlib import ExitStack, suppress

    from mongo_celery.embedded import MongoReplicaSet, RedisServer
    from mongo_celery.embedded.processes import end_by_signals
    from mongo_celery.embedded.server import find_binary

    if directory:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    under = (directory / "mongodb", directory / "redis") if directory else (None, None)
    small: dict[str, Any] = {"oplog_mb": oplog_mb, "sync_delay": 1.0} if oplog_mb else {}
    urls = {}
    if only != "mongodb":
        find_binary("redis-server")  # fail before spending three seconds on the other one
    with suppress(SystemExit), end_by_signals(), ExitStack() as stack:
        say(f"Starting {_NAMES.get(only, 'MongoDB and Redis')} ...", err=True)
        if only != "redis":
            urls["mongodb"] = stack.enter_context(MongoReplicaSet(port=mongo_port, directory=under[0], **small)).url
        if only != "mongodb":
            redis = RedisServer(port=redis_port, directory=under[1], appendonly=directory is not None)
            urls["redis"] = stack.enter_context(redis).url
        for line in [json.dumps(urls)] if as_json else _text(urls).split("\n"):
            say(line)
        threading.Event().wait()
    say("Ended.", err=True)


def _text(urls: Mapping[str, str]) -> str:
    lines = [f"{_NAMES[name]:<9}{url}" for name, url in urls.items()]
    if len(urls) > 1:
        lines += ["", _EXAMPLE.format(mongo=urls["mongodb"], redis=urls["redis"]), "Ctrl-C ends both."]
    else:
        lines.append("Ctrl-C ends it.")
    return "\n".join(lines)
