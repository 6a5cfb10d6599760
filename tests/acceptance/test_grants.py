"""The roles of `changes grants` on a server with access control: each is enough, and no right in it is too much."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from bson import Int64
from pymongo.errors import OperationFailure

from mongo_celery.bridge.operations import dead_letter_commands, lookups
from mongo_celery.bridge.operations.acts import read_history
from mongo_celery.bridge.operations.grants import ROLES, Right, list_rights, role_name
from mongo_celery.bridge.operations.operations import Operations
from mongo_celery.bridge.operations.preflight import check
from mongo_celery.bridge.operations.snapshot_reader import read_snapshot
from mongo_celery.bridge.state.dead_letters import DeadChange
from mongo_celery.bridge.wiring import Wiring
from mongo_celery.errors import MongoCeleryError
from tests.acceptance.grants_rig import DATA, NAME, STATE, Listening, Setting, bridge_on, lacks, names, stored
from tests.fixtures.availability import require_server
from tests.fixtures.forked import run_celery
from tests.fixtures.process import Processes, wait_for
from tests.integration.guarded import GuardedMongo

Document = dict[str, Any]
Said = Callable[[], str]

_UNAUTHORIZED = 13
_BIG = 5000
_SPILLED = 3
_PARTITIONING = 1
_RIGHTS = [
    pytest.param(role, action, right, id=f"{role}-{right.words.partition(' on ')[2]}-{action}")
    for role in ("listener", "worker", "operator")
    for right in list_rights(bridge_on("mongodb://nowhere", "memory://").wiring, role)
    if right.without is None
    for action in right.actions
]


@pytest.fixture(scope="module")
def server() -> Iterator[GuardedMongo]:
    require_server("mongod")
    with GuardedMongo() as started:
        yield started


@pytest.fixture(scope="module")
def setting(server: GuardedMongo, redis_server: Any) -> Iterator[Setting]:
    made = Setting(server, redis_server.url)
    yield made
    made.close()


@pytest.fixture
def clean(setting: Setting, redis_url: str) -> Setting:
    del redis_url  # empties it
    setting.clear()
    return setting


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Said:
    caplog.set_level("INFO", "mongo_celery")
    return lambda: "\n".join(record.getMessage() for record in caplog.records) + "\n"


# -- what each role does ---------------------------------------------------------------------------


def listen(setting: Setting, said: Said) -> str:
    """Lead, store what is blocked, store it again, repartition, withdraw replays; what was said."""
    orders, handlers = setting.bridge.wiring, setting.state["handlers"]
    with Listening(setting.bridge_of("listener").wiring, said) as listener:
        if not listener.wait(lambda: setting.state["snapshots"].count_documents({"state": "done"})):
            return said() + listener.text
        assert setting.bridge.operations.pause().run().fields["done"]
        for number in range(_SPILLED):
            setting.write("orders", n=number)
        if not listener.wait(lambda: setting.state["backlog"].count_documents({}) >= _SPILLED):
            return said() + listener.text
    setting.halt("record")
    _skip(orders, "record")
    letter = setting.state["dead_letters"].find_one() or {}
    setting.state["dead_letters"].insert_one({**letter, "_id": f"{letter['_id']}0", "parked": letter["hash"]})
    assert _replay(orders) == ["done", "done"]
    setting.state["dead_letters"].update_many({}, {"$set": {"replay.partitioningTerm": Int64(1)}})
    setting.bridge.operations.pause("record").run()
    old = {each["_id"] for each in setting.state["partitions"].find()}
    setting.bridge.operations.resume("letters").run()
    # An earlier listener may have ended before it stored its watermark.
    handlers.update_one({"_id": f"{NAME}/record"}, {"$unset": {"resumeToken": "", "clusterTime": ""}})
    stored_by = max(each["term"] for each in setting.state["backlog"].find())
    with Listening(setting.bridge_of("listener", partitions=2).wiring, said) as listener:
        again = {"_id": {"$regex": f"^{NAME}/record/"}, "term": {"$gt": stored_by}}
        listener.wait(lambda: setting.state["backlog"].count_documents(again) >= _SPILLED - 1)
        listener.wait(lambda: _has_switched(setting, old) and not _asked(setting))
        return said() + listener.text


def _skip(wiring: Wiring, handler: str) -> None:
    assert Operations(wiring).skip(handler, 0).run().fields["parts"][0]["result"] == "done"


def _letters(wiring: Wiring) -> Sequence[DeadChange]:
    return dead_letter_commands.find(wiring).letters


def _replay(wiring: Wiring) -> list[str]:
    return [each["result"] for each in Operations(wiring).replay_dead_letters().run().fields["parts"]]


def _asked(setting: Setting) -> int:
    return setting.state["dead_letters"].count_documents({"replay": {"$exists": True}})


def _has_switched(setting: Setting, old: set[str]) -> bool:
    mine = {"_id": {"$regex": f"^{NAME}/letters/"}}
    partitions = {each["_id"] for each in setting.state["partitions"].find(mine, {"_id": 1})}
    return len(partitions) == 2 and not partitions & old


def work(setting: Setting, said: Said, processes: Processes) -> str:
    """Succeed, set aside, replay, fetch what travels by reference, halt twice at one change; what the worker said."""
    arguments = ("worker", "-P", "solo", "-l", "INFO", "--without-gossip", "--without-mingle")
    environment = {"PROJECT_MONGO": setting.url("worker"), "PROJECT_BROKER": setting.broker}
    worker = processes.celery("tests.acceptance.grants_project", *arguments, environment=environment)
    with _led(setting, lambda: said() + worker.text) as listener:
        worker.wait_for_output("ready")
        # What is written before is none of this listener's, or comes by the snapshot, too.
        listener.wait(lambda: "reading from" in said() and setting.state["snapshots"].find_one({"state": "done"}))
        orders = setting.bridge.wiring
        letters = setting.state["dead_letters"]
        steps: tuple[tuple[Callable[[], object], Callable[[], object]], ...] = (
            (lambda: setting.write("orders"), lambda: setting.committed("record") == 1),
            (lambda: setting.write("letters", fails="once"), lambda: letters.count_documents({}) == 1),
            (lambda: setting.write("letters", fails=True), lambda: letters.count_documents({}) == 2),
            (lambda: _replay_in_a_chain(setting, orders), lambda: _replayed(setting)),
            (lambda: setting.write("orders", padding="x" * _BIG), lambda: setting.committed("record") == 2),
            (lambda: setting.write("orders", fails=True), lambda: _halted(setting, 1)),
        )
        for step, done in steps:
            step()
            if not listener.wait(done):
                return worker.text
        fence = _partition(setting)["fencingToken"]
        setting.bridge.operations.retry("record").run()
        listener.wait(lambda: _halted(setting, fence + 1))
        return worker.text


def _replay_in_a_chain(setting: Setting, orders: Wiring) -> None:
    """As of a parked key: the worker asks for the second when the first has succeeded."""
    setting.state["dead_letters"].update_many({}, {"$set": {"parked": Int64(7)}})
    assert _replay(orders) == ["done", "done"]


def _led(setting: Setting, said: Said) -> Listening:
    return Listening(bridge_on(setting.admin_url, setting.broker, start_from="now").wiring, said)


def _replayed(setting: Setting) -> bool:
    """Whether one of two dead letters has gone, and the other has failed again; and nothing is left to replay."""
    return [(each["replays"], "replay" in each) for each in setting.state["dead_letters"].find()] == [(1, False)]


def _halted(setting: Setting, fence: int) -> bool:
    found = _partition(setting)
    return found["state"] == "halted" and found["fencingToken"] >= fence and bool(found["retry"])


def _partition(setting: Setting) -> Document:
    return setting.state["partitions"].find_one({"_id": {"$regex": f"^{NAME}/record/"}}) or {}


def operate(wiring: Wiring) -> str:
    """Every command but `check` and those that ask nothing of MongoDB; what they said."""
    operations = Operations(wiring)
    steps: tuple[Callable[[], object], ...] = (
        lambda: read_snapshot(wiring),
        lambda: lookups.read_blocked_change(wiring, "record", 0),
        lambda: _skip(wiring, "record"),
        lambda: _skip(wiring, "letters"),
        lambda: [dead_letter_commands.change_of(wiring, each) for each in _letters(wiring)],
        lambda: _replay(wiring),
        lambda: operations.discard_dead_letters(limit=1).run(),
        lambda: operations.retry("record").run(),
        lambda: operations.pause("letters").run(),
        lambda: operations.resume("letters").run(),
        lambda: operations.start_snapshot("record").run(),
        lambda: operations.stop_snapshot("record").run(),
        lambda: operations.rotate_key(overlap=0).run(),
        lambda: operations.reset("record", "oldest").run(),
        lambda: operations.reset("letters", "oldest").run(),
        lambda: operations.remove("former", dead_letters=True).run(),
        lambda: read_history(wiring),
    )
    text = ""
    for step in steps:
        try:
            step()
        except MongoCeleryError as error:
            text += f"{error}\n"
    return text


@pytest.fixture
def standing(setting: Setting, clean: Setting, said: Said) -> Setting:
    """Give a bridge that nobody leads: each handler halted at a stored change, one with its history lost."""
    del clean
    with _led(setting, said) as listener:
        assert listener.wait(lambda: "reading from" in said())
        setting.bridge.operations.pause().run()
        setting.write("orders", n=1)
        setting.write("letters", n=1)
        both = {"record", "letters"}  # a document that a snapshot finds, too, is there twice
        assert listener.wait(lambda: {each["_id"].split("/")[1] for each in setting.state["backlog"].find()} == both)
    for subscription in ("record", "letters"):
        setting.halt(subscription)
    document = setting.state["handlers"].find_one({"_id": f"{NAME}/record"}) or {}
    place = max(document["startAtOperationTime"], document.get("clusterTime") or document["startAtOperationTime"])
    lost = {"since": None, "at": place, "oldest": None, "error": "it is gone"}
    setting.state["handlers"].update_one({"_id": f"{NAME}/record"}, {"$set": {"lost": lost}})
    for name in ("gone", "former"):
        _hold(setting, name)
    return setting


def _hold(setting: Setting, name: str) -> None:
    """Something of everything, of a handler that is not in the app."""
    prefix = f"{NAME}/{name}"
    model = setting.state["handlers"].find_one({"_id": f"{NAME}/letters"}) or {}
    setting.state["backlog"].insert_one({"_id": f"{prefix}/{_PARTITIONING}/0/82", "term": 1})
    layout = {"term": _PARTITIONING, "partitions": 1, "key": model["partitioning"]["key"]}
    setting.state["handlers"].insert_one({**model, "_id": prefix, "handler": name, "partitioning": layout})
    partition = setting.state["partitions"].find_one({"_id": {"$regex": f"^{NAME}/letters/"}}) or {}
    setting.state["partitions"].insert_one(
        {**partition, "_id": f"{prefix}/{_PARTITIONING}/0", "handler": name, "partition": 0}
    )
    for collection in ("dead_letters", "snapshots"):
        setting.state[collection].insert_one({"_id": f"{prefix}/82", "handler": name})


# -- each role is enough ---------------------------------------------------------------------------


def test_the_role_of_a_listener_is_enough(clean: Setting, said: Said) -> None:
    """Leading, the oplog's ends, spilling, repartitioning, replays, snapshots: without what is optional."""
    clean.only("listener")
    text = listen(clean, said)
    assert not lacks(text), text
    assert _refusals(text) == []


def test_the_role_of_a_worker_is_enough(clean: Setting, said: Said, processes: Processes) -> None:
    """Claims, commits, dead letters and replays, runs by reference, halting: without what is optional."""
    clean.only("worker")
    text = work(clean, said, processes)
    assert not lacks(text), text
    assert _refusals(text) == []
    assert _halted(clean, 1), "all steps were taken"
    assert clean.committed("record") == 2


@pytest.mark.slow
def test_workers_that_may_not_claim_are_named_and_no_change_is_charged(
    clean: Setting, said: Said, processes: Processes
) -> None:
    """P9, P14, P16: they answer Celery, and take messages. With the right the change runs, as if nothing was."""
    clean.only("worker", ("update", {"db": STATE, "collection": "partitions"}))
    arguments = ("worker", "-P", "solo", "-l", "INFO", "--without-gossip", "--without-mingle")
    environment = {"PROJECT_MONGO": clean.url("worker"), "PROJECT_BROKER": clean.broker}
    worker = processes.celery("tests.acceptance.grants_project", *arguments, environment=environment)

    def codes() -> set[str]:
        return {each.code for each in read_snapshot(clean.bridge.wiring).findings}

    with _led(clean, said):
        worker.wait_for_output("ready")
        wait_for(lambda: "reading from" in said())
        clean.write("orders")
        wait_for(lambda: "unclaimed" in codes(), message=lambda: f"{codes()}, {said()[-2000:]}")
        worker.wait_for_output("could not claim .*")
        clean.only("worker")
        wait_for(lambda: clean.committed("record") == 1)
        wait_for(lambda: "unclaimed" not in codes())
        # The connections of a user that is made again are refused everything, permanently.
        clean.admin.admin.command("dropUser", "worker")
        clean.write("orders")
        worker.wait_for_output("requires authentication|Authentication failed")
        clean.admin.admin.command("createUser", "worker", pwd="worker", roles=[role_name(NAME, "worker")])
        wait_for(lambda: clean.committed("record") == 2, message=lambda: f"{codes()}, {worker.text[-2000:]}")
        assert clean.admin[STATE]["dead_letters"].count_documents({}) == 0
    assert said().count("ran none of them") in {1, 2}, "once more if the second outage lasts"


def test_the_role_of_an_operator_is_enough(standing: Setting) -> None:
    """Every command; and `check` calls nothing wrong with the rights."""
    standing.only("operator")
    wiring = standing.bridge_of("operator").wiring
    before = stored(standing.state)
    text = operate(wiring)
    assert text == ""
    after = stored(standing.state)
    changed = {name for name, documents in after.items() if documents != before.get(name)}
    assert changed == set(before), "the commands did something"
    asked = sum("replay" in each for each in after["dead_letters"])
    assert (len(after["dead_letters"]), asked) == (2, 1), "one of two is discarded; one of a removed handler"
    named = {each["_id"].split("/")[1] for each in after["snapshots"]}
    assert named == {"gone", "letters", "record"}, "one forgotten, and those that were asked for"
    findings = {finding.code: finding for finding in check(wiring)}
    wiring.client.close()
    judged = {name: findings[name].severity for name in ("state_rights", "change_stream", "oplog_rights")}
    assert judged == {"state_rights": "ok", "change_stream": "degraded", "oplog_rights": "ok"}, findings
    assert "operator" in findings["state_rights"].sentence
    assert not any(lacks(finding.sentence) for finding in findings.values() if finding.severity == "failing")


def test_a_viewer_shows_everything_and_changes_nothing_and_a_worker_takes_no_lease(standing: Setting) -> None:
    """Status, dead letters and history; it reads no key, no other database, and every command is refused."""
    standing.only("viewer")
    wiring = standing.bridge_of("viewer").wiring
    before = stored(standing.state)
    status = read_snapshot(wiring)
    assert status.oplog_seconds is None, "that is optional"
    assert {each.name for each in status.handlers} >= {"record", "letters"}
    assert lookups.read_blocked_change(wiring, "record", 0).bytes
    for read in (_letters, read_history):
        read(wiring)
    for command in (lambda each: _skip(each, "record"), lambda each: Operations(each).rotate_key().run()):
        with pytest.raises(MongoCeleryError):
            command(wiring)
    for database, collection in ((STATE, "bridge_keys"), ("local", "oplog.rs"), (DATA, "orders")):
        with pytest.raises(OperationFailure) as refused:
            wiring.client[database][collection].find_one()
        assert refused.value.code == _UNAUTHORIZED
    wiring.client.close()
    # A worker reads what it needs to verify a message, and exchanges no key, and takes no lease.
    standing.only("worker")
    bridge = standing.bridge_of("worker")  # its client lives as long as it does
    state = bridge.wiring.client[STATE]
    assert state["bridge_keys"].find_one()
    for collection in ("bridge_keys", "leases", "handlers"):
        with pytest.raises(OperationFailure) as refused:
            state[collection].update_one({}, {"$set": {"x": 1}})
        assert refused.value.code == _UNAUTHORIZED
    bridge.client.close()
    assert stored(standing.state) == before


def _refusals(text: str) -> list[str]:
    return [line for line in text.splitlines() if "not authorized" in line.lower()]


# -- and no right in it is too much ----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("role", "action", "right"), _RIGHTS)
def test_without_a_right_something_fails_and_names_it(
    request: pytest.FixtureRequest, setting: Setting, said: Said, role: str, action: str, right: Right
) -> None:
    """P9: with any one of them removed, what fails says in one sentence which one it lacks."""
    request.getfixturevalue("standing" if role == "operator" else "clean")
    setting.only(role, (action, right.resource))
    if role == "operator":
        text = operate(setting.bridge_of("operator").wiring)
    elif role == "worker":
        text = work(setting, said, request.getfixturevalue("processes"))
    else:
        text = listen(setting, said)
    assert names(text, action, right), text[-4000:]
    assert "full error" not in text


# -- the command -----------------------------------------------------------------------------------


def test_the_command_prints_what_a_server_takes(clean: Setting) -> None:
    """As JSON, one object a role; MongoDB takes the commands as they are, twice with `--update`."""
    roles = [json.loads(line) for line in _grants(clean, "--json", "--user", "somebody").splitlines()]
    assert [each["role"] for each in roles] == ["listener", "worker", "operator", "viewer"]
    clean.admin.admin.command("createUser", "somebody", pwd="somebody", roles=[])
    updated = [json.loads(line) for line in _grants(clean, "--json", "--update").splitlines()]
    for first, second in zip(roles, updated, strict=True):
        clean.admin.admin.command("dropRole", first["commands"][0]["createRole"])
        for command in (*first["commands"], *second["commands"]):
            clean.admin.admin.command(command)
    found = clean.admin.admin.command("usersInfo", "somebody")["users"][0]["roles"]
    assert {each["role"] for each in found} == {f"mongo_celery_{NAME}_{each['role']}" for each in roles}
    for role in ROLES:  # whoever had them has lost them with the role
        clean.admin.admin.command("grantRolesToUser", role, roles=[f"mongo_celery_{NAME}_{role}"])
    text = _grants(clean, "--role", "listener")
    (command, _) = json.JSONDecoder().raw_decode(text.partition("db.adminCommand(")[2])
    assert command == roles[0]["commands"][0], "mongosh takes it as it is"


def _grants(setting: Setting, *arguments: str) -> str:
    environment = {"PROJECT_MONGO": "mongodb://nobody:secret@127.0.0.1:1/", "PROJECT_BROKER": setting.broker}
    line = ("-A", "tests.acceptance.grants_project", "changes", "grants", *arguments)
    done = run_celery(*line, environment=environment)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout
