"""
The kinds of faults: how long each may keep a partition from making progress, and how it is done to a world.

The bounds are what docs/guarantees.md promises for the times in `setting`; where it names none, what follows from
them: a lost message is sent again after the grace, a dead claim lapses first. Each fault begins, lasts, and ends. Its
end, or `heal`, undoes all that it leaves behind: a run ends with everything as it should be.
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from pymongo import MongoClient
from pymongo.errors import PyMongoError
from redis.exceptions import RedisError

from mongo_celery.embedded import MongoServer
from mongo_celery.embedded.processes import polls
from tests.chaos.facts import Step
from tests.chaos.setting import BRIDGE, CLAIM_TTL, DISPATCH_GRACE, FLOWS, HOT, LEASE_TTL, LISTENER, STATE, WORKER
from tests.chaos.world import World, signal_all
from tests.fixtures.election import Elections
from tests.fixtures.proxy import Proxy
from tests.rig.keeper import Role

_SWEEP = 1.0
_LOST_MESSAGE = DISPATCH_GRACE + 2 * _SWEEP
_DEAD_CLAIM = CLAIM_TTL + DISPATCH_GRACE + _SWEEP
_TAKE_OVER = LEASE_TTL + 2.0
_HANG = 8.0  # until a client has given up a server that is frozen
_ELECTION = 5.0

_STATE_COMMANDS = ["findAndModify", "update", "find", "aggregate", "insert", "delete"]
_ERRORS = [91, 189, 11600, 11602, 10107, 13435, 6, 7, 89]
_SHARE = 0.3
_SLOW_SECONDS = 0.25
_DELAY_MILLISECONDS = 300
_REPEATS = 60
_LEASE_SECONDS = 3 * LEASE_TTL
_SNAPSHOT_SECONDS = 60.0
_SLOWLY = 0.5
_RATE = 20
"""Documents a second of a snapshot that is to last, so that something befalls it."""

Doing = Iterator[None]
Do = Callable[[World, Step], Doing]


@dataclass(frozen=True, slots=True)
class Kind:
    """
    One kind of fault.

    Attributes:
        on: what it befalls; two faults on one thing never overlap. A snapshot befalls nobody.
        bound: seconds from its end, or from its begin if something else takes over, until all makes progress.
        do: begins it, and ends it.
        lasts: seconds, at least and at most.
        members: how many the replica set must have at least.
        alone: whether it is only for a set of one member.
        elects: whether it makes the set elect a primary.
    """

    name: str
    on: str
    bound: float
    do: Do
    lasts: tuple[float, float] = (0.0, 0.0)
    members: int = 1
    alone: bool = False
    elects: bool = False

    @property
    def has_successor(self) -> bool:
        """Whether nothing waits for its end: another process takes over, or a primary that is elected."""
        return self.on in {"listener", "worker", "snapshot"} or self.elects


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault as it was; times are those of the servers' machine, in seconds."""

    name: str
    begin: float
    end: float

    @property
    def kind(self) -> Kind:
        return STALL if self.name == STALL.name else KINDS[self.name]

    @property
    def until(self) -> float:
        """When everything makes progress, at the latest."""
        return max((self.begin if self.kind.has_successor else self.end) + self.kind.bound, self.end)


def happen(world: World, step: Step, ended: threading.Event) -> None:
    """Let a fault happen, for as long as it lasts, or until the run ends."""
    with contextmanager(KINDS[step.does].do)(world, step):
        ended.wait(step.lasts)


def _between(begin: Callable[[], object], *ends: Callable[[], object]) -> Doing:
    begin()
    try:
        yield
    finally:
        for end in ends:
            end()


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
    pids = children or (role.process.pid,)
    return _between(
        lambda: signal_all(role.process, pids, signal.SIGSTOP), lambda: signal_all(role.process, pids, signal.SIGCONT)
    )


def _pool_process(role: Role, step: Step) -> int:
    children = role.process.children()
    return children[int(step.choice * 97) % len(children)] if children else role.process.pid


def _kill_pool_process(world: World, step: Step) -> Doing:
    role = _chosen(world, step, "worker")
    pid = _pool_process(role, step)
    role.asked |= pid == role.process.pid
    signal_all(role.process, [pid], signal.SIGKILL)
    yield


def _paused(server: Any) -> Doing:
    return _between(server.pause, server.resume)


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


def _fail_commands(**data: Any) -> Do:
    def do(world: World, step: Step) -> Doing:
        """For listeners or for workers, since one failpoint names one of them."""
        chosen = {"appName": LISTENER if step.choice < 0.5 else WORKER, "failCommands": _STATE_COMMANDS}
        if "errorCode" in data:
            data["errorCode"] = _ERRORS[int(step.choice * 1000) % len(_ERRORS)]
        point = ("configureFailPoint", "failCommand")
        how = {"activationProbability": _SHARE}
        with MongoClient[dict[str, Any]](_primary(world).url) as client:
            yield from _between(
                lambda: client.admin.command(*point, mode=how, data={**chosen, **data}),
                lambda: client.admin.command(*point, mode="off"),
            )

    return do


def _kill_cursors(world: World, _step: Step) -> Doing:
    with suppress(PyMongoError), MongoClient[dict[str, Any]](_primary(world).url) as client:
        streams = {"$match": {"appName": LISTENER, "cursor.cursorId": {"$exists": True}}}
        options = {"allUsers": True, "idleCursors": True, "idleConnections": True}
        for found in client.admin.aggregate([{"$currentOp": options}, streams]):
            database, _, collection = found["ns"].partition(".")
            client[database].command({"killCursors": collection, "cursors": [found["cursor"]["cursorId"]]})
    yield


def _proxy(world: World) -> Proxy:
    assert world.mongo is not None, "a plan knows the number of members"
    return world.mongo


def _lost_network(world: World, step: Step) -> Doing:
    """What was swallowed is gone: nobody waits for it."""
    proxy = _proxy(world) if step.choice < 0.6 else world.network
    return _between(proxy.black_hole, proxy.pass_through, proxy.reset)


def _step_down(world: World, _step: Step) -> Doing:
    with suppress(PyMongoError), MongoClient[dict[str, Any]](_primary(world).url) as client:
        client.admin.command({"replSetStepDown": 2, "force": True})
    yield
    world.replica_set.wait_until_ready()


def _recover(world: World, _step: Step) -> Doing:
    """Have the one member answer as neither primary nor secondary; all reach it directly, by new connections."""
    member = _primary(world)
    with MongoClient[dict[str, Any]](member.url) as client:
        with suppress(PyMongoError):
            client.admin.command({"replSetStepDown": 60, "force": True})
        client.admin.command({"replSetMaintenance": 1})
        yield from _between(
            _proxy(world).reset,
            lambda: client.admin.command({"replSetMaintenance": 0}),
            lambda: client.admin.command({"replSetFreeze": 0}),
            world.replica_set.wait_until_ready,
        )


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
    return sum(path.read_bytes().count(b"leading bridge") for path in world.logs.glob("*listener*"))


def _primary(world: World) -> MongoServer:
    return world.replica_set.primary if len(world.replica_set.members) > 1 else world.replica_set.members[0]


def _snapshot(world: World, step: Step) -> Doing:
    """A person orders a snapshot; over when it is, and before that nobody wonders that documents come again."""
    name, rate = choose_snapshot(step)
    # Poison is left out, since each new start of it would be counted. "-" is the character before "."; a pattern would
    # fail on a key that is no UTF-8.
    key = "$documentKey._id"
    own = {"$and": [{"$gte": [key, f"{name}-"]}, {"$lt": [key, f"{name}."]}]}
    match = json.dumps({"$or": [{"$eq": [key, HOT]}, own]})
    world.command("snapshot", "start", name, "--yes", "--match", match, *rate)
    yield
    mine = {"_id": {"$gte": f"{BRIDGE}/{name}/", "$lt": f"{BRIDGE}/{name}0"}, "state": "running"}
    for _ in polls(_SNAPSHOT_SECONDS):
        with suppress(PyMongoError):
            if world.client[STATE]["snapshots"].find_one(mine, {"_id": 1}) is None:
                return


def choose_snapshot(step: Step) -> tuple[str, tuple[str, ...]]:
    names = sorted(FLOWS)
    place = step.choice * len(names)
    return names[int(place)], ("--rate", str(_RATE)) if place % 1 < _SLOWLY else ()


def _freeze_worker(world: World, step: Step, *, alone: bool) -> Doing:
    role = _chosen(world, step, "worker")
    return _frozen(role, *([_pool_process(role, step)] if alone else [role.process.pid, *role.process.children()]))


def _kill_primary(world: World, _step: Step) -> Doing:
    member = _primary(world)
    return _between(member.kill, member.restart, world.replica_set.wait_until_ready)


_KINDS = (
    Kind("kill listener", "listener", _TAKE_OVER, lambda world, step: _kill(_listener(world, step))),
    Kind("freeze listener", "listener", _TAKE_OVER, lambda world, step: _frozen(_listener(world, step)), (3.0, 6.0)),
    Kind("end listener", "listener", 1.5, lambda world, step: _end(_listener(world, step))),
    Kind("kill worker", "worker", _DEAD_CLAIM, lambda world, step: _kill(_chosen(world, step, "worker"))),
    Kind("freeze worker", "worker", _DEAD_CLAIM, partial(_freeze_worker, alone=False), (4.0, 8.0)),
    Kind("end worker", "worker", _LOST_MESSAGE, lambda world, step: _end(_chosen(world, step, "worker"))),
    Kind("kill pool process", "worker", _DEAD_CLAIM, _kill_pool_process),
    Kind("freeze pool process", "worker", _DEAD_CLAIM, partial(_freeze_worker, alone=True), (4.0, 8.0)),
    Kind(
        "kill redis", "redis", _LOST_MESSAGE, lambda world, _: _between(world.redis.kill, world.redis.restart),
        (0.5, 3.0),
    ),
    Kind("freeze redis", "redis", _LOST_MESSAGE, lambda world, _: _paused(world.redis), (1.0, 4.0)),
    Kind("flush redis", "redis", _LOST_MESSAGE, _at_redis(lambda broker: broker.flushall())),
    Kind("delete queues", "redis", _LOST_MESSAGE, _at_redis(_delete_queues)),
    Kind(
        "cut redis clients", "redis", _LOST_MESSAGE,
        _at_redis(lambda broker: broker.client_kill_filter(_type="normal", skipme=True)),
    ),
    Kind("repeat messages", "redis", 1.0, _repeat_messages, (1.0, 3.0)),
    Kind("freeze mongod", "mongod", _HANG, lambda world, _: _paused(_primary(world)), (1.0, 5.0)),
    Kind("state commands fail", "mongod", _ELECTION, _fail_commands(errorCode=91), (2.0, 5.0)),
    Kind("state connections close", "mongod", _ELECTION, _fail_commands(closeConnection=True), (2.0, 5.0)),
    Kind(
        "state commands are slow", "mongod", _ELECTION,
        _fail_commands(blockConnection=True, blockTimeMS=_DELAY_MILLISECONDS), (2.0, 5.0),
    ),
    Kind("kill cursors", "mongod", 2.0, _kill_cursors),
    Kind(
        "network is slow", "network", _ELECTION,
        lambda world, _: _between(lambda: _proxy(world).delay(_SLOW_SECONDS), _proxy(world).pass_through),
        (2.0, 5.0), alone=True,
    ),
    Kind(
        "network resets", "network", _ELECTION,
        lambda world, _: _between(_proxy(world).reset, world.network.reset), alone=True,
    ),
    Kind("network is lost", "network", _HANG, _lost_network, (1.0, 4.0), alone=True),
    Kind("step down", "mongod", _ELECTION, _step_down, elects=True),
    Kind("member recovers", "mongod", _ELECTION, _recover, (2.0, 4.0), alone=True),
    Kind("kill primary", "mongod", _ELECTION, _kill_primary, (2.0, 4.0), members=3, elects=True),
    Kind(
        "take back writes", "mongod", _HANG,  # of the bridge, that nobody else has
        lambda world, _: _between(lambda: Elections(world.replica_set).under_load(STATE)), members=3, elects=True,
    ),
    Kind("snapshot", "snapshot", _SWEEP, _snapshot, (2.0, 6.0)),
    Kind("take back a lease", "mongod", _HANG + _TAKE_OVER, _take_back_lease, members=3, elects=True),
)  # fmt: skip
KINDS: Mapping[str, Kind] = MappingProxyType({kind.name: kind for kind in _KINDS})
"""What a plan can have."""

STALL = Kind("machine stalls", "machine", _DEAD_CLAIM, lambda *_: iter(()))
"""Not planned: a machine that is busy with other things does it."""
