"""The clusters that take part, and their collections opened as the protocol needs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bson.codec_options import CodecOptions
from pymongo import MongoClient, ReadPreference, WriteConcern
from pymongo.collection import Collection
from pymongo.read_concern import ReadConcern

from mongo_celery.errors import ConfigurationError
from mongo_celery.twophase.participants import Client, Part

Source = Collection[Any] | Callable[[], Collection[Any]]


class Clusters:
    """
    Finds a participant's collection again, in any process.

    Args:
        own: gives the transactions' client.
        others: other clusters by alias: clients, or callables that return them.
    """

    def __init__(self, own: Callable[[], MongoClient[Any]], others: Mapping[str, Client]) -> None:
        self._own = own
        self._others = dict(others)

    def open(self, part: Part) -> Collection[dict[str, Any]]:
        """
        A participant's collection.

        Raises:
            ConfigurationError: its cluster is not known here.
        """
        if part.cluster is not None and part.cluster not in self._others:
            raise ConfigurationError(
                f"participant {part} is in the cluster {part.cluster!r}, which this process does not know: "
                f"TwoPhaseCommit(..., clients={{{part.cluster!r}: client}}).",
            )
        client = self._own() if part.cluster is None else _client(self._others[part.cluster])
        database, _, name = part.namespace.partition(".")
        return strict(client[database][name])

    def alias(self, client: MongoClient[Any]) -> str | None:
        """
        The alias of a client; None for the transactions' own.

        Raises:
            ConfigurationError: it is neither; after a crash nobody could find the participant.
        """
        if client is self._own():
            return None
        for alias, given in self._others.items():
            if _client(given) is client:
                return alias
        raise ConfigurationError(
            "a participant's collection has a client that this process could not find again after a crash: use the "
            "transactions' own client, name the collection as 'db.collection', or list its client in clients={...}.",
        )


def opened(source: Source) -> Collection[dict[str, Any]]:
    """A collection or what a callable returns, with the concerns of the protocol."""
    # A Collection is callable, only to say that it is not.
    return strict(source if isinstance(source, Collection) else source())


def strict(collection: Collection[Any]) -> Collection[dict[str, Any]]:
    """Majority writes and reads, primary, plain dicts: whatever its owner has set is meant for other purposes."""
    return collection.with_options(
        codec_options=CodecOptions(tz_aware=True, uuid_representation=collection.codec_options.uuid_representation),
        write_concern=WriteConcern("majority"),
        read_concern=ReadConcern("majority"),
        read_preference=ReadPreference.PRIMARY,
    )


def _client(given: Client) -> MongoClient[Any]:
    return given if isinstance(given, MongoClient) else given()
