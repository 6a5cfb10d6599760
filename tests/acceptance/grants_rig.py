"""One bridge whose listener, workers and operator log in as users of their own, each with a role as it is printed."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from celery import Celery
from pymongo import MongoClient

from mongo_celery import Bridge, Change
from mongo_celery.bridge.listener.listener import Listener
from mongo_celery.bridge.operations.grants import ROLES, Right, list_rights, role_command, role_name
from mongo_celery.bridge.wiring import Wiring
from mongo_celery.errors import MongoCeleryError
from tests.fixtures.mongo import empty
from tests.fixtures.process import PATIENCE_SECONDS, wait_for
from tests.integration.guarded import GuardedMongo

Document = dict[str, Any]

NAME = "grants"
STATE = "grants_state"
DATA = "grants_data"
OPTIONS: Document = {
    "partitions": 1,
    "lease_ttl": 5.0,
    "claim_ttl": 2.0,
    "dispatch_grace": 1.5,
    "commit_grace": 0.5,
    "spill_after": 0.2,
    "max_message_bytes": 2000,
}
SECONDS_MAX = PATIENCE_SECONDS
_LACKING = re.compile(r"missing right is|lacks|the actions? (?:changeStream|serverStatus)")
_NAMED = re.compile(r"(?:missing right is|lacks) ([\w, ]+?) on ([\w.]+)")
_SENTENCES = {
    ("changeStream", f"{DATA}."): "the actions changeStream and find",
    ("find", f"{DATA}."): "the actions changeStream and find",
    ("serverStatus", "None."): "the action serverStatus on the cluster",
}
_OPTIONAL = "could not create the indexes"


def bridge_on(url: str, broker: str, **options: Any) -> Bridge:
    """The bridge, for the user of a URL."""
    app = Celery(NAME, broker=broker, set_as_current=False)
    app.conf.broker_connection_retry_on_startup = True
    bridge = Bridge(app, url, name=NAME, database=STATE, **{**OPTIONS, **options})
    bridge.on_change(f"{DATA}.orders", name="record")(record)
    bridge.on_change(f"{DATA}.letters", name="letters", failure_policy="dead_letter", start_from="snapshot")(letters)
    return bridge


def record(change: Change) -> None:
    _act(change)


def letters(change: Change) -> None:
    _act(change)


def _act(change: Change) -> None:
    fails = (change.full_document or {}).get("fails")
    if fails and not (fails == "once" and change.replayed):
        raise ValueError("as asked")


class Setting:
    """
    A set with a user a role, and the bridge's databases in it.

    Attributes:
        admin: a client that may do everything; `bridge` is the bridge as it sees it.
    """

    def __init__(self, server: GuardedMongo, broker: str) -> None:
        self._server, self.broker = server, broker
        self.admin_url = server.address_of("root")
        self.admin: MongoClient[Document] = MongoClient(self.admin_url)
        self.bridge = bridge_on(self.admin_url, broker)
        self.state = self.admin[STATE]
        for role in ROLES:
            self._grant(role, self.rights(role))
            self.admin.admin.command("createUser", role, pwd=role, roles=[role_name(NAME, role)])

    def close(self) -> None:
        self.admin.close()
        self.bridge.client.close()

    def rights(self, role: str) -> list[Right]:
        return [right for right in list_rights(self.bridge.wiring, role) if right.without is None]

    def url(self, role: str) -> str:
        return self._server.address_of(role)

    def bridge_of(self, role: str, **options: Any) -> Bridge:
        return bridge_on(self.url(role), self.broker, **options)

    def only(self, role: str, *without: tuple[str, Document]) -> None:
        self._grant(role, self.rights(role), without, update=True)

    def _grant(
        self, role: str, rights: Sequence[Right], without: Sequence[tuple[str, Document]] = (), *, update: bool = False
    ) -> None:
        command = role_command(NAME, role, rights, update=update)
        for privilege in command["privileges"]:
            left = [each for each in privilege["actions"] if (each, privilege["resource"]) not in without]
            privilege["actions"] = left
        command["privileges"] = [each for each in command["privileges"] if each["actions"]]
        self.admin.admin.command(command)

    def clear(self) -> None:
        for name in (STATE, DATA):
            empty(self.admin, name)

    def write(self, collection: str, **fields: Any) -> None:
        self.admin[DATA][collection].insert_one(fields)

    def halt(self, subscription: str) -> None:
        """Let a partition, of which changes are stored, have halted at the first of them. Nobody may lead."""
        mine = {"_id": {"$regex": f"^{NAME}/{subscription}/"}}
        change = self.state["backlog"].find_one(mine, sort=[("_id", 1)])
        assert change, f"nothing of {subscription} is stored"
        partition, _, data = change["_id"].rpartition("/")
        head = {"resumeToken": {"_data": data}, "key": "a change"}
        retry = {"count": 0, "crashes": 0, "notBefore": None, "error": "e"}
        halted = {"state": "halted", "halted": head, "retry": retry}
        self.state["partitions"].update_one({"_id": partition}, {"$set": halted})

    def committed(self, subscription: str) -> int:
        found = self.state["partitions"].find({"_id": {"$regex": f"^{NAME}/{subscription}/"}})
        return sum(document["committed"] for document in found)


class Listening:
    """A listener in a thread of this process, until the end of its `with` block."""

    def __init__(self, wiring: Wiring, said: Callable[[], str]) -> None:
        self._wiring, self._said = wiring, said
        self._listener = Listener(wiring)
        self._thread = threading.Thread(target=self._run, name="listener", daemon=True)
        self._failure: BaseException | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._listener.stop()
        self._thread.join()
        self._wiring.client.close()

    def _run(self) -> None:
        try:
            self._listener.run()
        except BaseException as failure:  # noqa: BLE001 - what it is, the test says
            self._failure = failure

    @property
    def text(self) -> str:
        """What it has ended with."""
        if self._failure is None:
            return ""
        assert isinstance(self._failure, MongoCeleryError), repr(self._failure)
        return str(self._failure)

    def wait(self, condition: Callable[[], object]) -> bool:
        """Wait for something; False where a right is missed before."""

        def known() -> object:
            return condition() or lacks(self._said() + self.text) or self._failure

        wait_for(known, SECONDS_MAX, lambda: self._said()[-4000:])
        return bool(condition()) and not self._failure


def lacks(text: str) -> list[str]:
    """Return the lines which say that a right is missing that is not optional."""
    return [line for line in text.splitlines() if _LACKING.search(line) and _OPTIONAL not in line]


def names(text: str, action: str, right: Right) -> bool:
    """Return True if a line says that exactly this action on exactly this resource is missing."""
    where = f"{right.database}.{right.collection}"
    for actions, resource in _NAMED.findall(text):
        if action in re.split(r", | or ", actions) and resource.rstrip(".") == where.rstrip("."):
            return True
    sentence = _SENTENCES.get((action, where))
    return sentence is not None and sentence in text


def stored(database: Any) -> Mapping[str, list[Document]]:
    return {name: list(database[name].find()) for name in database.list_collection_names()}
