"""
Passwords, keys and contents stay where they belong: the whole way of a change, and what goes wrong on it, is searched.

MongoDB and Redis ask for passwords that occur nowhere else. Whatever processes and commands write, whatever lies in the
broker and in the state, is searched for these, as they are, escaped and in base64; and for the bridge's signing key.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import urlopen

import pytest
import redis
from pymongo import MongoClient

from mongo_celery.embedded import RedisServer
from tests.fixtures.availability import require_server
from tests.fixtures.process import Processes, ProjectProcess, wait_for
from tests.fixtures.redis import MakeRedis
from tests.integration.guarded import GuardedMongo
from tests.rig.project import OPTIONS, Project

Document = dict[str, Any]

MONGO_CANARY = "mongo canary@8c1e"
BROKER_CANARY = "broker canary@51fa"
CONTENTS = "canary-contents-5b1d"
USER = "somebody-77"
COMMANDS = (
    ("status", "--json"),
    ("check",),
    ("check", "--json"),
    ("status",),
    ("queues", "--json"),
    ("show", "summarise", "0", "--json"),
    ("retry", "--yes", "--json"),
    ("pause", "--yes", "--json"),
    ("resume", "--yes", "--json"),
    ("rotate-key", "--json"),
    ("grants", "--json"),
)
_FEW = 2


class Guarded(Project):
    """Servers that ask for passwords, processes and commands of one app, and all that these have written."""

    app = "tests.acceptance.cli_project"
    options = MappingProxyType({**OPTIONS, "partitions": 1, "queues": 1})

    def __init__(self, mongo: GuardedMongo, broker: RedisServer, processes: Processes) -> None:
        self.written: dict[str, str] = {}
        self._mongo, self._broker = mongo, broker
        with MongoClient[Document](mongo.address_of("root")) as client:
            client.admin.command("createUser", USER, pwd=MONGO_CANARY, roles=["root"])
        with redis.Redis(port=broker.port) as first:
            everything: Any = {"categories": ["+@all"], "keys": ["*"], "channels": ["*"]}
            first.acl_setuser(USER, enabled=True, passwords=[f"+{BROKER_CANARY}"], **everything)
            first.acl_setuser("default", enabled=False)
        url = self.mongo_url()
        super().__init__(processes, MongoClient[Document](url), url, self.broker_url())
        self.redis = redis.Redis(port=broker.port, username=USER, password=BROKER_CANARY)
        self.orders = self.data["orders"]

    def __exit__(self, *error: object) -> None:
        super().__exit__()
        self.client.close()
        self.redis.close()

    def mongo_url(self, password: str = MONGO_CANARY, address: str | None = None) -> str:
        where = address or self._mongo.address
        return f"mongodb://{USER}:{quote(password, safe='')}@{where}/?replicaSet=rs0&authSource=admin"

    def broker_url(self, password: str = BROKER_CANARY, port: int | None = None) -> str:
        return f"redis://{USER}:{quote(password, safe='')}@127.0.0.1:{port or self._broker.port}/0"

    def type(self, *arguments: str, **variables: str) -> int:
        """Run a command to its end, and keep what it writes; its status."""
        done = self.run(*arguments, **variables)
        self.written[f"{' '.join(arguments)} {variables}"] = done.stdout + done.stderr
        return done.returncode

    def broker_contents(self) -> str:
        readers: dict[bytes, Callable[[bytes], Any]] = {
            b"string": self.redis.get,
            b"list": lambda key: self.redis.lrange(key, 0, -1),
            b"hash": self.redis.hgetall,
            b"set": self.redis.smembers,
            b"zset": lambda key: self.redis.zrange(key, 0, -1),
        }
        found: Any = self.redis
        return "\n".join(f"{key!r} {readers.get(found.type(key), str)(key)!r}" for key in list(found.keys()))

    def state_contents(self, but: str = "", field: str = "") -> str:
        """Everything in the state database, but the keys, a collection and a field."""
        names = set(self.state.list_collection_names()) - {"bridge_keys", but}
        documents = ((name, document) for name in sorted(names) for document in self.state[name].find())
        return "\n".join(f"{name} { ({**document, field: None})!r}" for name, document in documents)

    def keys(self) -> list[bytes]:
        found = self.state["bridge_keys"].find_one() or {}
        others = [*found["previous"], *filter(None, [found["next"]])]
        return [bytes(each["key"]) for each in (found, *others)]


@pytest.fixture
def guarded(make_redis: MakeRedis, processes: Processes) -> Iterator[Guarded]:
    require_server("mongod")
    with GuardedMongo() as mongo, Guarded(mongo, make_redis(), processes) as made:
        yield made


@pytest.mark.parametrize(
    "most", [pytest.param(_FEW, id="few commands"), pytest.param(None, id="all", marks=pytest.mark.slow)]
)
def test_passwords_and_keys_are_nowhere(guarded: Guarded, most: int | None) -> None:
    """P9, P11: logs at level DEBUG, tracebacks, commands and their JSON, messages, stored documents."""
    listener = guarded.start("listener", "-l", "DEBUG", "--http", "0")
    listener.wait_for_output("reading from")
    guarded.orders.insert_many([{"_id": each, "text": CONTENTS} for each in (1, 2)])
    wait_for(lambda: guarded.redis.llen("shop.0"), message="a change waits at the broker")
    contents = guarded.broker_contents()
    worker = guarded.worker("-P", "solo", level="DEBUG")
    guarded.orders.insert_one({"_id": 3, "bad": "a [bad] order", "text": CONTENTS})
    wait_for(lambda: guarded.state["partitions"].find_one({"state": "halted"}), message="it has halted")
    keys = guarded.keys()
    for command in COMMANDS[:most]:
        # What has halted is failing, and may have halted again before it can be paused.
        allowed = {"status": {2}, "check": {2}, "pause": {0, 1}, "resume": {0, 1}}.get(command[0], {0})
        assert guarded.type("changes", *command) in allowed, command
    soon = guarded.variables({"start_timeout": 1.0})["PROJECT_OPTIONS"]
    for urls in _wrong_urls(guarded)[:most]:
        assert guarded.type("listener", "-l", "DEBUG", PROJECT_OPTIONS=soon, **urls) == 1, guarded.written
        if most is None:
            assert guarded.type("changes", "check", "--json", **urls) == 2, guarded.written
    contents += guarded.broker_contents()
    keys += guarded.keys()
    wait_for(lambda: guarded.state["partitions"].find_one({"state": "halted"}), message="it has halted again")
    guarded.written.update(_served(listener))
    assert guarded.type("changes", "skip", "summarise", "--yes") == 0
    assert "ValueError" in guarded.state_contents(), "a dead letter says why"
    written = {**guarded.written, "listener": listener.text, "worker": worker.text}
    _search({**written, "broker": contents, "state": guarded.state_contents()}, keys)
    # What has halted is stored with its contents, and shown. Of a dead letter nothing but its change has them.
    for text in (listener.text, worker.text, guarded.state_contents("backlog", "change")):
        assert CONTENTS not in text
        assert CONTENTS.encode() not in _decoded(text)


def _decoded(text: str) -> bytes:
    """What base64 in a text would hide."""
    found = b""
    for word in re.findall(r"[A-Za-z0-9+/]{40,}", text):
        for start in range(4):  # the beginning may be cut off, or belong to something else
            part = word[start:]
            found += base64.b64decode(part[: len(part) // 4 * 4])
    return found


def _served(listener: ProjectProcess) -> dict[str, str]:
    address = listener.wait_for_output(r"serving HTTP at (http://127\.0\.0\.1:\d+)/").group(1)
    found = {}
    for path in ("/", "/status", "/metrics", "/verdict", "/readyz", "/healthz"):
        try:
            with urlopen(f"{address}{path}", timeout=30) as answer:
                found[path] = answer.read().decode()
        except HTTPError as error:  # what has halted is failing
            with error:
                found[path] = error.read().decode()
    assert "halted" in found["/verdict"]
    return found


def _wrong_urls(guarded: Guarded) -> tuple[dict[str, str], ...]:
    """Mistyped passwords that hold the right one, servers that are away, and a URL that cannot be read."""
    return (
        {"PROJECT_MONGO": guarded.mongo_url(f"{MONGO_CANARY}x")},
        {"PROJECT_BROKER": guarded.broker_url(f"{BROKER_CANARY}x")},
        {"PROJECT_MONGO": guarded.mongo_url(address="127.0.0.1:1")},
        {"PROJECT_BROKER": guarded.broker_url(port=1)},
        {"PROJECT_MONGO": f"mongodb://{USER}:{MONGO_CANARY}/@127.0.0.1:1/?replicaSet=rs0"},
    )


def _search(texts: Mapping[str, str], keys: list[bytes]) -> None:
    secrets = [form for each in (MONGO_CANARY, BROKER_CANARY) for form in (each, quote(each), quote(each, safe=""))]
    secrets += [form for key in keys for form in (key.hex(), repr(key)[2:-1], base64.b64encode(key).decode())]
    for name, text in texts.items():
        assert text, name
        told = [line for line in text.splitlines() if "DEBUG/" not in line]  # PyMongo's own are at that level
        assert not [line for line in told if "full error" in line], name
        hidden = _decoded(text)
        for secret in secrets:
            assert secret not in text, f"{secret} in {name}"
            assert secret.encode() not in hidden, f"{secret} in base64 in {name}"
        for key in keys:
            assert key not in hidden, f"a key in base64 in {name}"


def test_the_search_finds_what_it_looks_for() -> None:
    """A checker that has never failed has not been tested."""
    key = bytes(range(32))
    for text in (
        f"x{MONGO_CANARY}x",
        quote(BROKER_CANARY),
        base64.b64encode(b"padding before it: " + MONGO_CANARY.encode() + b" and behind").decode(),
        repr({"k": key}),
        key.hex(),
        base64.b64encode(b"head of the message " + key + b" and its tail").decode(),
    ):
        with pytest.raises(AssertionError):
            _search({"text": text}, [key])
    _search({"text": "nothing"}, [key])
