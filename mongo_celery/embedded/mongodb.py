"""MongoDB for development and tests: one mongod, and a replica set of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypedDict, Unpack

from pymongo import MongoClient
from pymongo.errors import OperationFailure, PyMongoError

from mongo_celery.embedded.binaries import find_binary, mongod_version
from mongo_celery.embedded.processes import polls
from mongo_celery.embedded.server import HOST, DataDirectory, Server
from mongo_celery.errors import EmbeddedServerError

REPLICA_SET_NAME = "rs0"
PRIMARY_SECONDS_MAX = 60.0
_ANSWER_MILLISECONDS_MAX = 2000
_FAREWELL_MILLISECONDS = 100  # a primary's grace for its clients at a regular shutdown; by default 15 s
_FAREWELL_SINCE = (5, 0)  # servers refuse parameters that they do not know
_ALREADY_INITIALIZED = 23
_OPLOG_MB = 64
_SETTINGS = {"electionTimeoutMillis": 1000, "heartbeatIntervalMillis": 300}


class MongoOptions(TypedDict, total=False):
    """
    The options of each mongod, whether it is alone or one of a set.

    Attributes:
        oplog_mb: size of a member's oplog in megabytes (10^6 or 2^20, as mongod sees it); 64 if left out.

        sync_delay: seconds between checkpoints; mongod's own 60 if left out. A small oplog is only cut back at
            checkpoints: with 1, and an oplog of 1 MB, it rolls over within a second of heavy writing.

        parameters: server parameters, such as `["enableTestCommands=1"]` for failpoints.

        binary: the program; found by `find_binary` if left out.
    """

    oplog_mb: int
    sync_delay: float
    parameters: Sequence[str]
    binary: str | os.PathLike[str]


class MongoServer(Server):
    """
    One mongod on 127.0.0.1: standalone, or a member that `MongoReplicaSet` sets up.

    Args:
        replica_set: The name of the set to join once it is initiated; a standalone if left out.

        directory: Where to keep data and port, beyond `stop`; a temporary directory if left out.

        port: The port; that of the directory, or a free one, if left out.

        options: as of `MongoOptions`.
    """

    binary_name = "mongod"
    ready_words = "waiting for connections"

    def __init__(
        self,
        *,
        replica_set: str | None = None,
        directory: str | os.PathLike[str] | None = None,
        port: int | None = None,
        **options: Unpack[MongoOptions],
    ) -> None:
        super().__init__(directory=directory, port=port, binary=options.get("binary"))
        self._replica_set = replica_set
        self._options = options

    @property
    def address(self) -> str:
        """Host and port, as replica set configurations name a member."""
        return f"{HOST}:{self.port}"

    @property
    def url(self) -> str:
        """The address of this one process, whatever its role in a set."""
        return f"mongodb://{self.address}/?directConnection=true"

    def _arguments(self, directory: Path, port: int) -> list[str]:
        arguments = [
            *("--bind_ip", HOST, "--port", str(port), "--nounixsocket", "--dbpath", str(directory)),
            *("--wiredTigerCacheSizeGB", "0.5", "--setParameter", "diagnosticDataCollectionEnabled=false"),
        ]
        if mongod_version(find_binary(self.binary_name, self._binary)) >= _FAREWELL_SINCE:
            arguments += ["--setParameter", f"shutdownTimeoutMillisForSignaledShutdown={_FAREWELL_MILLISECONDS}"]
        if self._replica_set is not None:
            oplog_mb = self._options.get("oplog_mb", _OPLOG_MB)
            arguments += ["--replSet", self._replica_set, "--oplogSize", str(oplog_mb)]
        if "sync_delay" in self._options:
            arguments += ["--syncdelay", str(self._options["sync_delay"])]
        for parameter in self._options.get("parameters", ()):
            arguments += ["--setParameter", parameter]
        return arguments


class MongoReplicaSet:
    """
    A replica set on 127.0.0.1: a context manager, or `start` and `stop`.

    One member is enough for change streams and transactions. Three give elections, within about
    two seconds after a primary is lost. The members, and the signals to single ones, are in
    `members`; the set's own methods apply to all of them.

    Args:
        members: How many.

        directory: Where to keep data and ports, beyond `stop`; a temporary directory if left out.

        port: The first member's port, and the ones after it; those of the directory, or free ones, if left out.

        options: as of `MongoOptions`, for each member.
    """

    def __init__(
        self,
        members: int = 1,
        *,
        directory: str | os.PathLike[str] | None = None,
        port: int | None = None,
        **options: Unpack[MongoOptions],
    ) -> None:
        if members < 1:
            raise ValueError(f"A replica set has at least one member, not {members}.")
        self._directory = DataDirectory(directory)
        self._count = members
        self._wanted_port = port
        self._options = options
        self._members: list[MongoServer] = []

    @property
    def members(self) -> list[MongoServer]:
        """The members, in the order of their configuration; empty before the first start."""
        return list(self._members)

    @property
    def url(self) -> str:
        """The address of the set, for clients that follow its primary."""
        if not self._members:
            raise EmbeddedServerError("The replica set has no address before its first start: call start().")
        addresses = ",".join(member.address for member in self._members)
        return f"mongodb://{addresses}/?replicaSet={REPLICA_SET_NAME}"

    @property
    def pid(self) -> int:
        """The process id of the first member."""
        if not self._members:
            raise EmbeddedServerError("The replica set is not running: call start().")
        return self._members[0].pid

    @property
    def primary(self) -> MongoServer:
        """The member that accepts writes now; waits for one while there is an election."""
        return self._await_roles(everyone=False)

    def start(self) -> Self:
        """
        Start all members, initiate the set if it is new, and wait until it accepts writes.

        Afterwards one member is a writable primary and all others are secondaries. Members that run
        already keep running. After an error nothing runs that did not run before the first start.

        Raises:
            EmbeddedServerError: There is no mongod, it did not become ready, or no primary was elected.
        """
        fresh = not self._members
        try:
            if fresh:
                self._members = self._make_members()
            with ThreadPoolExecutor(len(self._members)) as pool:
                list(pool.map(MongoServer.start, self._members))
            self._initiate()
            self.wait_until_ready()
        except BaseException:
            if fresh:
                self.stop()
            raise
        return self

    def wait_until_ready(self) -> None:
        """
        Wait until every running member is primary or secondary, and one of them accepts writes.

        Raises:
            EmbeddedServerError: It took longer than a minute.
        """
        self._await_roles(everyone=True)

    def stop(self) -> None:
        """
        End all members; harmless if none runs.

        Data in a given directory is left as after a regular shutdown; a temporary one is removed.
        """
        self._each(MongoServer.kill if self._directory.own else MongoServer.stop)
        self._members = []
        self._directory.remove()

    def restart(self) -> Self:
        """Start all members again on the same ports and data, and wait as `start` does."""
        self._each(MongoServer.restart)
        return self.start()

    def kill(self) -> None:
        """End all members by SIGKILL; ports and data stay for `restart`."""
        self._each(MongoServer.kill)

    def pause(self) -> None:
        """Freeze all members by SIGSTOP."""
        self._each(MongoServer.pause)

    def resume(self) -> None:
        """Let paused members go on."""
        self._each(MongoServer.resume)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _each(self, action: Any) -> None:
        if self._members:
            with ThreadPoolExecutor(len(self._members)) as pool:
                list(pool.map(action, self._members))

    def _make_members(self) -> list[MongoServer]:
        return [
            MongoServer(
                replica_set=REPLICA_SET_NAME,
                directory=self._directory.path / f"member-{index}",
                port=None if self._wanted_port is None else self._wanted_port + index,
                **self._options,
            )
            for index in range(self._count)
        ]

    def _initiate(self) -> None:
        config: dict[str, Any] = {
            "_id": REPLICA_SET_NAME,
            "members": [{"_id": index, "host": member.address} for index, member in enumerate(self._members)],
            "settings": _SETTINGS,
        }
        with _direct_client(self._members[0]) as client:
            try:
                client.admin.command("replSetInitiate", config)
            except OperationFailure as error:
                if error.code != _ALREADY_INITIALIZED:
                    raise EmbeddedServerError(f"The replica set could not be initiated: {error}") from error

    def _await_roles(self, *, everyone: bool) -> MongoServer:
        with ExitStack() as stack:
            running = [member for member in self._members if member.running]
            clients = [(member, stack.enter_context(_direct_client(member))) for member in running]
            for _ in polls(PRIMARY_SECONDS_MAX):
                roles = [(member, _hello(client)) for member, client in clients]
                primary = next((member for member, hello in roles if hello.get("isWritablePrimary")), None)
                settled = all(hello.get("isWritablePrimary") or hello.get("secondary") for _, hello in roles)
                if primary is not None and (settled or not everyone):
                    return primary
        raise EmbeddedServerError(
            f"The replica set had no primary within {PRIMARY_SECONDS_MAX:.0f} s: are most of its "
            f"{self._count} members running?"
        )


def _direct_client(member: MongoServer) -> MongoClient[dict[str, Any]]:
    return MongoClient(
        member.url,
        serverSelectionTimeoutMS=_ANSWER_MILLISECONDS_MAX,
        connectTimeoutMS=_ANSWER_MILLISECONDS_MAX,
        socketTimeoutMS=_ANSWER_MILLISECONDS_MAX * 10,  # initiation waits for the other members
    )


def _hello(client: MongoClient[dict[str, Any]]) -> dict[str, Any]:
    try:
        return client.admin.command("hello")
    except PyMongoError:
        return {}
