"""Comparison of clients by cluster, from their current knowledge."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from pymongo import AsyncMongoClient, MongoClient, ReadPreference
from pymongo.server_description import ServerDescription

from mongo_celery.errors import ConfigurationError

AnyClient = MongoClient[Any] | AsyncMongoClient[Any]


def is_same_cluster(one: AnyClient, other: AnyClient) -> bool:
    """
    Return True if two clients use the same replica set, router or server.

    Clients know this from their servers' last answers, without a command. A client without an answer sends one `ping`,
    unless both share an address.

    Not promised: recognising one sharded cluster through two routers.

    Raises:
        PyMongoError: no server answers.
        ConfigurationError: an asyncio client has not connected yet.
    """
    if one is other or _addresses(one) & _addresses(other):
        return True
    mine, theirs = _answers(one), _answers(other)
    if _addresses(one) & _addresses(other) or _processes(mine) & _processes(theirs):
        return True
    known = {(each.replica_set_name, each.me): _process(each) for each in theirs}
    if any(known.get((each.replica_set_name, each.me), _process(each)) != _process(each) for each in mine):
        return False  # two sets with equal names and members, for example on two machines or containers
    return bool(_members(mine) & _members(theirs))


def has_answers(client: AnyClient) -> bool:
    """Return True if a server has answered a client, so that no wait is needed."""
    return client.topology_description.has_known_servers


async def wait_for_answer(client: AnyClient) -> None:
    """Wait until a server answers an asyncio client for the first time. For other clients a comparison does this."""
    if isinstance(client, AsyncMongoClient) and not has_answers(client):
        await client.admin.command("ping", read_preference=ReadPreference.NEAREST)


def _answers(client: AnyClient) -> list[ServerDescription]:
    if not has_answers(client):
        if isinstance(client, AsyncMongoClient):
            raise ConfigurationError(
                "The AsyncMongoClient has not connected yet, so its cluster is unknown. Connect it at the start "
                'of the program: await client.admin.command("ping").'
            )
        client.admin.command("ping", read_preference=ReadPreference.NEAREST)
    return client.topology_description.known_servers


def _addresses(client: AnyClient) -> set[Any]:
    return set(client.topology_description.server_descriptions())


def _process(server: ServerDescription) -> Any:
    return (server.topology_version or {}).get("processId")


def _processes(servers: list[ServerDescription]) -> set[Any]:
    return {_process(each) for each in servers} - {None}


def _members(servers: list[ServerDescription]) -> set[Any]:
    return {(each.replica_set_name, host) for each in servers if each.replica_set_name for host in each.all_hosts}


def connections_in_transaction() -> Iterator[Any]:
    """Yield Django's connections whose `session` has a transaction, without importing Django."""
    if "django_mongodb_backend.base" in sys.modules:
        from django.db import connections

        for connection in connections.all(initialized_only=True):
            session = getattr(connection, "session", None)
            if session is not None and session.in_transaction:
                yield connection
