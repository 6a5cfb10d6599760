"""The clusters that take part, and their collections opened as the protocol needs them."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

from bson.codec_options import DatetimeConversion
from pymongo import MongoClient, ReadPreference
from pymongo.collection import Collection
from pymongo.errors import PyMongoError, ServerSelectionTimeoutError

from mongo_celery.errors import ConfigurationError, TransactionTimeoutError
from mongo_celery.forking import PerProcess
from mongo_celery.mongo.cluster import is_same_cluster
from mongo_celery.mongo.opening import Client, plain_types, resolve_client, with_majority
from mongo_celery.twophase.participants import Part

_OPENED_MAX = 1000
"""Collections that are kept opened: some have a database for each customer."""

_away: ContextVar[Container[str]] = ContextVar("mongo_celery_clusters_away", default=())


class AwayError(ServerSelectionTimeoutError):
    """A cluster that is known not to answer was not asked."""


@contextmanager
def without(clusters: Container[str]) -> Iterator[None]:
    """Inside, nothing is asked of clusters that are known not to answer: what needs them fails with an AwayError."""
    token = _away.set(clusters)
    try:
        yield
    finally:
        _away.reset(token)


def is_away(cluster: str | None) -> bool:
    """Whether a cluster is not to be asked."""
    return cluster is not None and cluster in _away.get()


@contextmanager
def noted(cluster: str | None) -> Iterator[None]:
    """Note in what a server, or the time, has raised which cluster it was: there are several, and one is away."""
    try:
        yield
    except (PyMongoError, TransactionTimeoutError) as error:
        if cluster is not None:
            error.add_note(f"in cluster {cluster!r}")
        raise


class Clusters:
    """
    Finds a participant's collection again, in any process.

    Args:
        own: gives the transactions' collection.
        others: other clusters by alias: clients, or callables that return them, asked once a process.
    """

    def __init__(self, own: Callable[[], Collection[Any]], others: Mapping[str, Client]) -> None:
        self._own = own
        self._others = {alias: PerProcess(partial(resolve_client, given)) for alias, given in others.items()}
        self._standalone: dict[tuple[int, str | None], bool] = {}
        self._opened: dict[tuple[int, str | None, str], Collection[dict[str, Any]]] = {}
        self._beside: set[tuple[int, str]] = set()

    def open(self, part: Part) -> Collection[dict[str, Any]]:
        """
        A participant's collection.

        Raises:
            ConfigurationError: its cluster is not known here.
            AwayError: it is not to be asked.
        """
        if is_away(part.cluster):
            raise AwayError(f"cluster {part.cluster!r} does not answer")
        place = (os.getpid(), part.cluster, part.namespace)
        found = self._opened.get(place)
        if found is None:
            if len(self._opened) >= _OPENED_MAX:
                self._opened.clear()
            found = self._opened[place] = self._open(part)
        return found

    def refuse_unknown(self, parts: Iterable[Part]) -> None:
        """
        Refuse what this process cannot finish; nothing is asked of a server.

        Raises:
            ConfigurationError: the cluster of a participant is not known here.
        """
        for part in parts:
            if not self.knows(part.cluster):
                raise ConfigurationError(
                    f"participant {part} is in the cluster {part.cluster!r}, which this process does not know: "
                    f"TwoPhaseCommit(..., clients={{{part.cluster!r}: client}}).",
                )

    def _open(self, part: Part) -> Collection[dict[str, Any]]:
        self.refuse_unknown([part])
        own, client = self._own(), self.client(part.cluster)
        database, _, name = part.namespace.partition(".")
        # Ids are sent as they were read: both with the codec of the transactions.
        return opened(client[database].get_collection(name, codec_options=own.codec_options))

    def refuse_elsewhere(self, accounts: Collection[Any]) -> None:
        """
        Refuse accounts that are not in the transactions' cluster; once it has agreed, a process asks no more.

        Raises:
            ConfigurationError: they are in another one, or two routers keep that from being seen.
        """
        own, place = self._own(), (os.getpid(), accounts.full_name)
        if place in self._beside:
            return
        if not is_same_cluster(accounts.database.client, own.database.client):
            raise ConfigurationError(
                f"accounts {accounts.full_name} are in another cluster than the transactions {own.full_name}: give a "
                "collection of the transactions' own client, and for documents in other clusters use begin with "
                "clients={...}."
            )
        self._beside.add(place)

    def client(self, cluster: str | None) -> MongoClient[Any]:
        """The client of a cluster that is known here."""
        return self._own().database.client if cluster is None else self._others[cluster].get()

    def ping(self, cluster: str | None) -> None:
        """Have the primary of a cluster answer once; raises PyMongoError if it does not."""
        self.client(cluster).get_database("admin", read_preference=ReadPreference.PRIMARY).command("ping")

    def is_standalone(self, cluster: str | None) -> bool:
        """Whether a cluster has no MongoDB transactions; it is asked once a process."""
        place = (os.getpid(), cluster)
        if place not in self._standalone:
            with noted(cluster):
                answer = self.client(cluster).admin.command("hello")
            # A member that has just started has no set yet, and says that it will have one.
            in_set = "setName" in answer or "isreplicaset" in answer
            self._standalone[place] = not in_set and answer.get("msg") != "isdbgrid"
        return self._standalone[place]

    def knows(self, cluster: str | None) -> bool:
        """Whether this process can reach a cluster of that alias."""
        return cluster is None or cluster in self._others

    def alias(self, client: MongoClient[Any]) -> str | None:
        """
        The alias of a client; None for the transactions' own.

        Raises:
            ConfigurationError: it is neither; after a crash nobody could find the participant.
        """
        if client is self._own().database.client:
            return None
        for alias, given in self._others.items():
            if given.get() is client:
                return alias
        raise ConfigurationError(
            "a participant's collection has a client that this process could not find again after a crash: use the "
            "transactions' own client, name the collection as 'db.collection', or list its client in clients={...}.",
        )


def opened(collection: Collection[Any]) -> Collection[dict[str, Any]]:
    """
    With the concerns of the protocol, and plain dicts.

    A time that Python cannot hold is read all the same, so that one document does not hide others.
    """
    return with_majority(collection, plain_types(collection, datetime_conversion=DatetimeConversion.DATETIME_AUTO))
