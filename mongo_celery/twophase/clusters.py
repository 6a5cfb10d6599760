"""The participating clusters, and their collections with the concerns of the protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from bson.codec_options import DatetimeConversion
from pymongo import MongoClient, ReadPreference
from pymongo.collection import Collection

from mongo_celery.errors import ConfigurationError
from mongo_celery.forking import PerProcess
from mongo_celery.mongo.opening import Client, plain_types, resolve_client, with_majority
from mongo_celery.twophase.participants import Part


class Clusters:
    """
    Finds a participant's collection in any process.

    Args:
        own: returns the transactions' collection.
        others: other clusters by alias: clients, or functions that return them and are called once per process.
    """

    def __init__(self, own: Callable[[], Collection[Any]], others: Mapping[str, Client]) -> None:
        self._own = own
        self._others = {alias: PerProcess(partial(resolve_client, given)) for alias, given in others.items()}
        self._has_transactions: bool | None = None

    def open(self, part: Part) -> Collection[dict[str, Any]]:
        """
        Return a participant's collection.

        Raises:
            ConfigurationError: this process does not know its cluster.
        """
        self.refuse_unknown([part])
        database, _, name = part.namespace.partition(".")
        # Ids are sent as they were read, both with the codec of the transactions.
        types = self._own().codec_options
        return open_collection(self.client(part.cluster)[database].get_collection(name, codec_options=types))

    def refuse_unknown(self, parts: Iterable[Part]) -> None:
        """
        Refuse participants that this process cannot finish, without querying a server.

        Raises:
            ConfigurationError: this process does not know a participant's cluster.
        """
        for part in parts:
            if part.cluster is not None and part.cluster not in self._others:
                raise ConfigurationError(
                    f"Participant {part} is in the cluster {part.cluster!r}, which this process does not know. "
                    f"Give its client: TwoPhaseCommit(..., clients={{{part.cluster!r}: client}}).",
                )

    def client(self, cluster: str | None) -> MongoClient[Any]:
        """Return the client of a known cluster. None stands for the log's own cluster."""
        return self._own().database.client if cluster is None else self._others[cluster].get()

    def ping(self, cluster: str | None) -> None:
        """Wait until the primary of a cluster answers once. Otherwise raise PyMongoError."""
        if cluster is None or cluster in self._others:
            self.client(cluster).get_database("admin", read_preference=ReadPreference.PRIMARY).command("ping")

    def has_transactions(self) -> bool:
        """Return True if the log's own cluster has MongoDB transactions. Queried once per process."""
        if self._has_transactions is None:
            answer = self.client(None).admin.command("hello")
            # A member that has just started has no set yet, and reports that it will have one.
            is_in_set = "setName" in answer or "isreplicaset" in answer
            self._has_transactions = is_in_set or answer.get("msg") == "isdbgrid"
        return self._has_transactions

    def find_alias(self, client: MongoClient[Any]) -> str | None:
        """
        Return the alias of a client. None for the transactions' own client.

        Raises:
            ConfigurationError: the client is unknown, so no process could find the participant after a crash.
        """
        if client is self._own().database.client:
            return None
        for alias, given in self._others.items():
            if given.get() is client:
                return alias
        raise ConfigurationError(
            "Recovery could not find the client of a participant's collection after a crash. Use the client of "
            "the transactions, write the collection as 'db.collection', or list its client in clients={...}.",
        )


def open_collection(collection: Collection[Any]) -> Collection[dict[str, Any]]:
    """
    Return a collection with the protocol's concerns and plain dicts.

    It also reads times outside Python's range, so that one document does not hide others.
    """
    return with_majority(collection, plain_types(collection, datetime_conversion=DatetimeConversion.DATETIME_AUTO))
