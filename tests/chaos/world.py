"""
The servers and processes of a run, with a keeper that starts again what has ended.

With one member, listeners and workers reach MongoDB and Redis through a network of ours, one for each sort of process,
which can be slow, cut or lost. Three members are reached directly, since a driver asks them for their addresses.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

import redis
from pymongo import MongoClient

from mongo_celery.embedded import MongoReplicaSet, RedisServer
from tests.chaos.setting import APP, BRIDGE, LISTENER, LISTENERS, MESSAGE_BYTES_MAX, POOL, STATE, WORKER, WORKERS
from tests.fixtures.leaks import adopt_orphans
from tests.fixtures.process import Processes, ProjectProcess, wait_for
from tests.fixtures.proxy import Proxy
from tests.rig.keeper import Keeper, Role
from tests.rig.project import QUIET

_PARAMETERS = ["enableTestCommands=1", "transactionLifetimeLimitSeconds=5"]
"""The second one: what a killed worker has locked is free after 5 s instead of 60 s."""
_OPLOG_MB = 2000
_END_SECONDS = 20.0


class World:
    """
    All servers and processes of one run: a context manager.

    Attributes:
        keeper: starts listeners and workers again.
        mongo: the network between processes and MongoDB; None with several members.
        network: the network between processes and Redis.
    """

    def __init__(self, directory: Path, members: int, environment: dict[str, str] | None = None) -> None:
        self.replica_set = MongoReplicaSet(members, oplog_mb=_OPLOG_MB, parameters=_PARAMETERS)
        self.redis = RedisServer(options=("--proto-max-bulk-len", str(MESSAGE_BYTES_MAX)))
        self.gates = directory / "gates"
        self.logs = directory / "logs"
        self.mongo: Proxy | None = None
        self._members = members
        self._added = environment or {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.gates.mkdir(parents=True)
            self.logs.mkdir()
            adopt_orphans()
            stack.enter_context(self.replica_set)
            stack.enter_context(self.redis)
            if self._members == 1:
                self.mongo = stack.enter_context(Proxy(self.replica_set.members[0].port))
            self.network = stack.enter_context(Proxy(self.redis.port))
            self.client: MongoClient[dict[str, Any]] = stack.enter_context(
                MongoClient(self.replica_set.url, appname="chaos-runner", serverSelectionTimeoutMS=60_000)
            )
            self.processes = stack.enter_context(Processes(self.logs))
            self.keeper = stack.enter_context(Keeper(self.processes))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def start(self, roles: Sequence[str] | None = None) -> None:
        """Start all processes, and wait until a listener leads and workers consume."""
        names = [f"listener-{n}" for n in range(LISTENERS)] + [f"worker-{n}" for n in range(WORKERS)]
        for name in roles or names:
            self.keeper.keep(name, self._start)
        listeners = self.those("listener")
        wait_for(lambda: any("reading from" in each.process.text for each in listeners), message="a listener leads")
        for role in self.those("worker"):
            role.process.wait_for_output(r" ready\.")

    def those(self, sort: str) -> list[Role]:
        return [role for name, role in self.keeper.roles.items() if name.startswith(sort)]

    def leader(self) -> Role:
        """The listener that leads, by the logs; any where none does."""
        lease = self.client[STATE]["leases"].find_one({"_id": BRIDGE}) or {}
        listeners = self.those("listener")
        return next((role for role in listeners if role.process.pid == lease.get("pid")), listeners[0])

    def environment(self, name: str) -> dict[str, str]:
        url = self.mongo.mongo_url if self.mongo is not None else self.replica_set.url
        called = LISTENER if name.startswith("listener") else WORKER
        return {
            "CHAOS_MONGO": f"{url}&appName={called}",
            "CHAOS_FACTS": self.replica_set.url,
            "CHAOS_BROKER": self.network.redis_url,
            "CHAOS_GATES": str(self.gates),
            "CHAOS_ROLE": name,
            **self._added,
        }

    def command(self, *arguments: str) -> ProjectProcess:
        """Run one of the commands on changes to its end, as a person would; it reaches the servers directly."""
        direct = {"CHAOS_MONGO": self.replica_set.url, "CHAOS_BROKER": self.redis.url}
        done = self.processes.celery(
            APP, "changes", *arguments, name="command", environment={**self.environment("command"), **direct}
        )
        done.wait()
        assert "Usage: " not in done.text, f"there is no such command: {done.text}"
        return done

    def broker(self) -> Any:
        """A client of Redis itself; use it in a `with`."""
        return redis.Redis.from_url(self.redis.url, socket_timeout=5)

    @property
    def unasked_ends(self) -> dict[str, list[int]]:
        return {name: list(role.ends) for name, role in self.keeper.roles.items() if role.ends}

    def _start(self, name: str) -> ProjectProcess:
        arguments = ["listener"]
        if name.startswith("worker"):
            arguments = ["worker", "-c", str(POOL), "-n", f"{name}@%h", *QUIET]
        return self.processes.celery(APP, *arguments, "-l", "INFO", name=name, environment=self.environment(name))

    def end_processes(self) -> None:
        """End all processes regularly; the servers stay."""
        self.keeper.stop()
        for role in self.keeper.roles.values():
            role.process.ask_to_end()
        for role in self.keeper.roles.values():
            role.process.ends_within(_END_SECONDS)
            role.process.end()


def signal_all(process: ProjectProcess, pids: Sequence[int], number: signal.Signals) -> None:
    """Send a signal to a process of the world and to some of its children; those that have ended get none."""
    for pid in pids:
        if pid == process.pid:
            process.send(number)
        else:
            with suppress(ProcessLookupError):
                if process.running and os.getpgid(pid) == process.pid:  # and no other process's by now
                    os.kill(pid, number)
