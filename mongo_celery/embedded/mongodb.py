"""MongoDB for development and tests: a single mongod, and a replica set."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypedDict, Unpack

from pymongo import MongoClient
from pymongo.errors import OperationFailure, PyMongoError

from mongo_celery.embedded.processes import polls
from mongo_celery.embedded.server import HOST, Server, find_binary, mongod_version
from mongo_celery.errors import EmbeddedServerError

REPLICA_SET_NAME = "rs0"
PRIMARY_SECONDS_MAX = 60.0
_ANSWER_MILLISECONDS_MAX = 2000
_FAREWELL_MILLISECONDS = 100  # a primary's grace period for clients at a regular shutdown: by default 15 s
_FAREWELL_SINCE = (5, 0)  # servers refuse unknown parameters
_ALREADY_INITIALIZED = 23
_SETTINGS = {"electionTimeoutMillis": 1000, "heartbeatIntervalMillis": 300}


class MongoOptions(TypedDict, total=False):
    """
    The options of each mongod, standalone or a member of a set.

    Attributes:
        oplog_mb: size of a member's oplog in megabytes (10^6 or 2^20, as mongod counts). By default 64.
        sync_delay: seconds between checkpoints. By default mongod's 60. MongoDB truncates a small oplog only at
            checkpoints. With 1, and an oplog of 1 MB, heavy writing removes old entries within a second.
        parameters: server parameters, such as `["enableTestCommands=1"]` for failpoints.
    """

    oplog_mb: int
    sync_delay: float
    parameters: Sequence[str]


class MongoServer(Server):
    """
    A mongod on 127.0.0.1: a standalone server, or a member of a `MongoReplicaSet`.

    ::

        with MongoServer() as server, MongoClient(server.url) as client:
            assert "setName" not in client.admin.command("hello")

    Args:
        replica_set: name of the server's future replica set. By default it is standalone.
        directory: keeps data and port after `stop`. By default the server has a temporary directory.
        port: by default the port stored in the directory, otherwise a free one.
        oplog_mb, sync_delay, parameters: see `MongoOptions`.
    """

    binary_name = "mongod"
    ready_words = "waiting for connections"

    def __init__(
        self,
        *,
        replica_set: str | None = None,
        directory: str | os.PathLike[str] | None = None,
        port: int | None = None,
        oplog_mb: int = 64,
        sync_delay: float | None = None,
        parameters: Sequence[str] = (),
    ) -> None:
        super().__init__(directory=directory, port=port)
        self._replica_set = replica_set
        self._oplog_mb = oplog_mb
        self._sync_delay = sync_delay
        self._parameters = parameters

    @property
    def address(self) -> str:
        """Host and port, in the form of a replica set's configuration."""
        return f"{HOST}:{self.port}"

    @property
    def url(self) -> str:
        """The URL of this process alone, even in a replica set."""
        return f"mongodb://{self.address}/?directConnection=true"

    def _arguments(self, directory: Path, port: int) -> list[str]:
        arguments = [
            *("--bind_ip", HOST, "--port", str(port), "--nounixsocket", "--dbpath", str(directory)),
            *("--wiredTigerCacheSizeGB", "0.5", "--setParameter", "diagnosticDataCollectionEnabled=false"),
        ]
        if mongod_version(find_binary(self.binary_name)) >= _FAREWELL_SINCE:
            arguments += ["--setParameter", f"shutdownTimeoutMillisForSignaledShutdown={_FAREWELL_MILLISECONDS}"]
        if self._replica_set is not None:
            arguments += ["--replSet", self._replica_set, "--oplogSize", str(self._oplog_mb)]
        if self._sync_delay is not None:
            arguments += ["--syncdelay", str(self._sync_delay)]
        for parameter in self._parameters:
            arguments += ["--setParameter", parameter]
        return arguments


class MongoReplicaSet:
    """
    A replica set on 127.0.0.1. Use it as a context manager, or call `start` and `stop`.

    One member is enough for change streams and transactions. Three members elect a new primary within about two
    seconds. To signal a single member, use `members`. The set's methods apply to all members.

    ::

        with MongoReplicaSet() as mongo, MongoClient(mongo.url) as client:
            client.shop.orders.insert_one({"_id": 1})

    Attributes:
        members: the members, in the order of their configuration.

    Args:
        members: number of members.
        directory: keeps data and ports after `stop`. By default each member has a temporary directory.
        port: the first member's port. Other members use the following ones. By default the ports stored in the
            directory, otherwise free ones.
        options: see `MongoOptions`. They apply to each member.
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
            raise ValueError(f"members={members} is too small. A replica set has at least one member.")
        self._directory = None if directory is None else Path(directory).absolute()
        self._has_data = False
        self.members = [
            MongoServer(
                replica_set=REPLICA_SET_NAME,
                directory=None if self._directory is None else self._directory / f"member-{index}",
                port=None if port is None else port + index,
                **options,
            )
            for index in range(members)
        ]

    @property
    def url(self) -> str:
        """The URL of the set. A client follows its primary."""
        addresses = ",".join(member.address for member in self.members)
        return f"mongodb://{addresses}/?replicaSet={REPLICA_SET_NAME}"

    @property
    def pid(self) -> int:
        """The process id of the first member."""
        return self.members[0].pid

    @property
    def primary(self) -> MongoServer:
        """The member that accepts writes now. During an election it waits for the new one."""
        return self._await_roles(everyone=False)

    def start(self) -> Self:
        """
        Start all members, initiate the set if it is new, and wait until it accepts writes.

        Afterwards one member is a writable primary, and the others are secondaries. Running members keep running. If
        the first start fails, no member runs.

        Raises:
            EmbeddedServerError: mongod was not found or did not become ready, or no primary was elected.
        """
        try:
            if self._directory is not None:
                self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._each(MongoServer.start)
            self._initiate()
            self.wait_until_ready()
        except BaseException:
            if not self._has_data:
                self.stop()
            raise
        self._has_data = True
        return self

    def wait_until_ready(self) -> None:
        """
        Wait until every running member is primary or secondary, and one of them accepts writes.

        Raises:
            EmbeddedServerError: this took longer than a minute.
        """
        self._await_roles(everyone=True)

    def stop(self) -> None:
        """
        End all members. It does nothing if none is running.

        Data in a given directory stays, as after a regular shutdown. Temporary directories are removed.
        """
        self._each(MongoServer.stop)
        self._has_data = False

    def restart(self) -> Self:
        """Start all members again with the same ports and data, and wait like `start`."""
        self._each(MongoServer.restart)
        return self.start()

    def kill(self) -> None:
        """End all members with SIGKILL. Ports and data stay for `restart`."""
        self._each(MongoServer.kill)

    def pause(self) -> None:
        """Freeze all members with SIGSTOP."""
        self._each(MongoServer.pause)

    def resume(self) -> None:
        """Resume paused members with SIGCONT."""
        self._each(MongoServer.resume)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _each(self, action: Callable[[MongoServer], object]) -> None:
        with ThreadPoolExecutor(len(self.members)) as pool:
            list(pool.map(action, self.members))

    def _initiate(self) -> None:
        config: dict[str, Any] = {
            "_id": REPLICA_SET_NAME,
            "members": [{"_id": index, "host": member.address} for index, member in enumerate(self.members)],
            "settings": _SETTINGS,
        }
        with _direct_client(self.members[0]) as client:
            try:
                client.admin.command("replSetInitiate", config)
            except OperationFailure as error:
                if error.code != _ALREADY_INITIALIZED:
                    raise EmbeddedServerError(f"The replica set could not be initiated: {error}") from error

    def _await_roles(self, *, everyone: bool) -> MongoServer:
        with ExitStack() as stack:
            running = [member for member in self.members if member.running]
            clients = [(member, stack.enter_context(_direct_client(member))) for member in running]
            for _ in polls(PRIMARY_SECONDS_MAX):
                roles = [(member, _hello(client)) for member, client in clients]
                primary = next((member for member, hello in roles if hello.get("isWritablePrimary")), None)
                settled = all(hello.get("isWritablePrimary") or hello.get("secondary") for _, hello in roles)
                if primary is not None and (settled or not everyone):
                    return primary
        raise EmbeddedServerError(
            f"The replica set had no primary within {PRIMARY_SECONDS_MAX:.0f} s. Check that most of its "
            f"{len(self.members)} members are running."
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
