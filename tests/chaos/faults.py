"""
Doing the faults of a plan to a world: each begins, lasts, and ends.

Whatever a fault leaves behind is undone by its end, or by `heal`: a run ends with everything as it should be.
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import Any

from pymongo import MongoClient
from pymongo.errors import PyMongoError
from redis.exceptions import RedisError

from mongo_celery.embedded import MongoServer
from mongo_celery.embedded.processes import polls
from tests.chaos.plan import Step
from tests.chaos.setting import BRIDGE, LEASE_TTL, LISTENER, STATE, WORKER
from tests.chaos.snapshots import snapshot
from tests.chaos.world import Role, World, signal_all
from tests.fixtures.election import Elections

_STATE_COMMANDS = ["findAndModify", "update", "find", "aggregate", "insert", "delete"]
_ERRORS = [91, 189, 11600, 11602, 10107, 13435, 6, 7, 89]
_SHARE = 0.3
_SLOW_SECONDS = 0.25
_DELAY_MILLISECONDS = 300
_REPEATS = 60
_LEASE_SECONDS = 3 * LEASE_TTL

Doing = Iterator[None]
Do = Callable[[World, Step], Doing]


def happen(world: World, step: Step, ended: threading.Event) -> None:
    """Let a fault happen, for as long as it lasts, or until the run ends."""
    with contextmanager(FAULTS[step.does])(world, step):
        ended.wait(step.lasts)


def _chosen(world: World, step: Step, sort: str) -> Role:
    roles = world.those(sort)
    return roles[int(step.choice * len(roles))]


def _listener(world: World, step: Step) -> Role:
    """Mostly the one that leads."""
    with suppress(PyMongoError):
        leader = world.leader()
        others = [role for role in world.those("listener") if role is not leader]
        return leader if step.choice < 0.8 else others[0]
    return world.those("listener")[0]


def _kill(role: Role) -> Doing:
    role.asked = True
    role.process.kill()
    yield


def _end(role: Role) -> Doing:
    role.asked = True
    role.process.ask_to_end()
    yield


def _frozen(role: Role, *children: int) -> Doing:
    process = role.process
    pids = children or (process.pid,)
    signal_all(process, pids, signal.SIGSTOP)
    try:
        yield
    finally:
        signal_all(process, pids, signal.SIGCONT)


def _freeze_worker(world: World, step: Step) -> Doing:
    role = _chosen(world, step, "worker")
    yield from _frozen(role, role.process.pid, *role.process.children())


def _pool_process(role: Role, step: Step) -> int:
    children = role.process.children()
    return children[int(step.choice * 97) % len(children)] if children else role.process.pid


def _freeze_pool_process(world: World, step: Step) -> Doing:
    role = _chosen(world, step, "worker")
    yield from _frozen(role, _pool_process(role, step))


def _kill_pool_process(world: World, step: Step) -> Doing:
    role = _chosen(world, step, "worker")
    pid = _pool_process(role, step)
    role.asked |= pid == role.process.pid
    signal_all(role.process, [pid], signal.SIGKILL)
    yield


def _kill_redis(world: World, _step: Step) -> Doing:
    world.redis.kill()
    try:
        yield
    finally:
        world.redis.restart()


def _freeze_redis(world: World, _step: Step) -> Doing:
    world.redis.pause()
    try:
        yield
    finally:
        world.redis.resume()


def _at_redis(act: Callable[[Any], object]) -> Do:
    def do(world: World, _step: Step) -> Doing:
        with suppress(RedisError), world.broker() as broker:
            act(broker)
        yield

    return do


def _delete_queues(broker: Any) -> None:
    for queue in broker.keys(f"{BRIDGE}.*"):
        broker.delete(queue)


def _repeat_messages(world: World, _step: Step) -> Doing:
    """What waits now, and what workers hold, comes once more, later."""
    messages: list[tuple[bytes, bytes]] = []
    with suppress(RedisError), world.broker() as broker:
        for queue in broker.keys(f"{BRIDGE}.*"):
            if broker.type(queue) == b"list":
                messages += [(queue, message) for message in broker.lrange(queue, 0, _REPEATS)]
        for held in broker.hvals("unacked"):
            message, _, queue = json.loads(held)
            messages.append((queue.encode(), json.dumps(message).encode()))
    yield
    with suppress(RedisError), world.broker() as broker:
        for queue, message in messages:
            broker.lpush(queue, message)


def _freeze_mongod(world: World, _step: Step) -> Doing:
    member = _primary(world)
    member.pause()
    try:
        yield
    finally:
        member.resume()


def _fail_commands(**data: Any) -> Do:
    def do(world: World, step: Step) -> Doing:
        """For listeners or for workers, since one failpoint names one of them."""
        chosen = {"appName": LISTENER if step.choice < 0.5 else WORKER, "failCommands": _STATE_COMMANDS}
        if "errorCode" in data:
            data["errorCode"] = _ERRORS[int(step.choice * 1000) % len(_ERRORS)]
        with MongoClient[dict[str, Any]](_primary(world).url) as client:
            client.admin.command(
                "configureFailPoint",
                "failCommand",
                mode={"activationProbability": _SHARE},
                data={**chosen, **data},
            )
            try:
                yield
            finally:
                client.admin.command("configureFailPoint", "failCommand", mode="off")

    return do


def _kill_cursors(world: World, _step: Step) -> Doing:
    """Of the stream, whoever reads it."""
    with suppress(PyMongoError), MongoClient[dict[str, Any]](_primary(world).url) as client:
        streams = {"$match": {"appName": LISTENER, "cursor.cursorId": {"$exists": True}}}
        options = {"allUsers": True, "idleCursors": True, "idleConnections": True}
        for found in client.admin.aggregate([{"$currentOp": options}, streams]):
            database, _, collection = found["ns"].partition(".")
            client[database].command({"killCursors": collection, "cursors": [found["cursor"]["cursorId"]]})
    yield


def _slow_network(world: World, _step: Step) -> Doing:
    assert world.mongo is not None, "a plan knows the number of members"
    world.mongo.delay(_SLOW_SECONDS)
    try:
        yield
    finally:
        world.mongo.pass_through()


def _lost_network(world: World, step: Step) -> Doing:
    proxy = world.mongo if step.choice < 0.6 else world.network
    assert proxy is not None, "a plan knows the number of members"
    proxy.black_hole()
    try:
        yield
    finally:
        proxy.pass_through()
        proxy.reset()  # what was swallowed is gone: nobody waits for it


def _reset_network(world: World, _step: Step) -> Doing:
    for proxy in filter(None, (world.mongo, world.network)):
        proxy.reset()
    yield


def _step_down(world: World, _step: Step) -> Doing:
    with suppress(PyMongoError), MongoClient[dict[str, Any]](_primary(world).url) as client:
        client.admin.command({"replSetStepDown": 2, "force": True})
    yield
    world.replica_set.wait_until_ready()


def _recover(world: World, _step: Step) -> Doing:
    """Have the one member answer as neither primary nor secondary; all reach it directly, by new connections."""
    assert world.mongo is not None, "a plan knows the number of members"
    member = _primary(world)
    with MongoClient[dict[str, Any]](member.url) as client:
        with suppress(PyMongoError):
            client.admin.command({"replSetStepDown": 60, "force": True})
        client.admin.command({"replSetMaintenance": 1})
        world.mongo.reset()
        try:
            yield
        finally:
            client.admin.command({"replSetMaintenance": 0})
            client.admin.command({"replSetFreeze": 0})
            world.replica_set.wait_until_ready()


def _kill_primary(world: World, _step: Step) -> Doing:
    member = _primary(world)
    member.kill()
    try:
        yield
    finally:
        member.restart()
        world.replica_set.wait_until_ready()


def _take_back(world: World, _step: Step) -> Doing:
    """The primary dies with writes of the bridge that nobody else has."""
    Elections(world.replica_set).under_load(STATE)
    yield


def _take_back_lease(world: World, step: Step) -> Doing:
    """Whoever takes the lease on a primary that nobody else hears of has it no more when that is gone."""
    with Elections(world.replica_set).held_back():
        role = _listener(world, step)
        before = _terms(world)
        yield from _kill(role)
        for _ in polls(_LEASE_SECONDS):
            if _terms(world) > before:
                break


def _terms(world: World) -> int:
    """How often a listener has said that it leads."""
    return sum(path.read_bytes().count(b"leading bridge") for path in world.logs.glob("*listener*"))


def _primary(world: World) -> MongoServer:
    return world.replica_set.primary if len(world.replica_set.members) > 1 else world.replica_set.members[0]


FAULTS: Mapping[str, Do] = MappingProxyType(
    {
        "kill listener": lambda world, step: _kill(_listener(world, step)),
        "freeze listener": lambda world, step: _frozen(_listener(world, step)),
        "end listener": lambda world, step: _end(_listener(world, step)),
        "kill worker": lambda world, step: _kill(_chosen(world, step, "worker")),
        "freeze worker": _freeze_worker,
        "end worker": lambda world, step: _end(_chosen(world, step, "worker")),
        "kill pool process": _kill_pool_process,
        "freeze pool process": _freeze_pool_process,
        "kill redis": _kill_redis,
        "freeze redis": _freeze_redis,
        "flush redis": _at_redis(lambda broker: broker.flushall()),
        "delete queues": _at_redis(_delete_queues),
        "cut redis clients": _at_redis(lambda broker: broker.client_kill_filter(_type="normal", skipme=True)),
        "repeat messages": _repeat_messages,
        "freeze mongod": _freeze_mongod,
        "state commands fail": _fail_commands(errorCode=91),
        "state connections close": _fail_commands(closeConnection=True),
        "state commands are slow": _fail_commands(blockConnection=True, blockTimeMS=_DELAY_MILLISECONDS),
        "kill cursors": _kill_cursors,
        "network is slow": _slow_network,
        "network resets": _reset_network,
        "network is lost": _lost_network,
        "step down": _step_down,
        "member recovers": _recover,
        "kill primary": _kill_primary,
        "take back writes": _take_back,
        "take back a lease": _take_back_lease,
        "snapshot": snapshot,
    }
)
