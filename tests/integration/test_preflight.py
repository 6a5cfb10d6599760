"""`changes check` against real servers: what is sound leaves nothing behind, and each fault has its finding."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from celery.app.task import Context
from pymongo.database import Database

from mongo_celery import Bridge
from mongo_celery.bridge.operations import broker_check
from mongo_celery.bridge.operations.preflight import check
from mongo_celery.bridge.worker.envelope import Carrier, Run, sign_run
from mongo_celery.bridge.worker.runtime import WorkerRuntime
from mongo_celery.errors import AccessError, ServerUnavailableError, TopologyError
from mongo_celery.findings import Finding
from tests.fixtures.mongo import MakeClient, MakeReplicaSet
from tests.integration.conftest import MakeBridge
from tests.integration.guarded import GuardedMongo
from tests.rig.led import NAME, LedBridge


@pytest.fixture(autouse=True)
def no_worker_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_check, "INSPECT_SECONDS", 0.01)


def by_code(bridge: Bridge) -> dict[str, Finding]:
    return {finding.code: finding for finding in check(bridge.wiring)}


def test_a_check_of_a_sound_deployment_leaves_nothing_behind(
    make_replica_set: MakeReplicaSet, make_client: MakeClient, make_bridge: MakeBridge, state_database: str
) -> None:
    """Nothing is written. On a set of its own: the session's oplog may be full."""
    own = make_replica_set()
    found = by_code(make_bridge(own.url))
    for name in ("topology", "state_rights", "change_stream", "oplog_rights", "oplog_window", "broker", "handlers"):
        assert found[name].severity == "ok", found[name]
    assert state_database not in make_client(own.url).list_database_names()


def test_a_frozen_server_is_a_finding(make_replica_set: MakeReplicaSet, make_bridge: MakeBridge) -> None:
    server = make_replica_set()
    bridge = make_bridge(server.url)
    assert bridge.operations.read_status().state == "never_started"
    server.pause()
    try:
        with pytest.raises(ServerUnavailableError):
            bridge.operations.read_status()
        assert check(bridge.wiring)[0].code == "state_unreadable"
    finally:
        server.resume()


def test_a_standalone_is_a_finding_beside_the_others(standalone_url: str, make_bridge: MakeBridge) -> None:
    bridge = make_bridge(standalone_url)
    found = by_code(bridge)
    assert (found["topology"].severity, found["broker"].severity) == ("failing", "ok")
    with pytest.raises(TopologyError):
        bridge.operations.read_status()


def test_a_check_lists_what_is_wrong_with_the_state_first(led: LedBridge) -> None:
    """P16: whoever reads the first finding, also in JSON, reads the worst."""
    led.halt()
    led.lose_history()
    found = check(led.bridge.wiring)
    severities = [each.severity for each in found]
    assert severities == sorted(severities, key=["failing", "degraded", "ok"].index)
    commands = {each.code: each.commands[0] for each in found if each.severity == "failing" and each.commands}
    assert commands["history_lost"] == "celery -A operations changes reset summarise --to oldest"
    assert "halted" in commands


@pytest.mark.parametrize(("wanted", "severity"), [("required", "failing"), ("whenAvailable", "degraded")])
def test_a_check_finds_collections_that_are_missing_or_keep_no_images(
    make_bridge: MakeBridge, database: Database[dict[str, Any]], wanted: str, severity: str
) -> None:
    bridge = make_bridge(full_document_before_change=wanted)
    found = by_code(bridge)
    assert (found["images"].severity, found["sources"].severity) == (severity, "degraded")
    assert f"{database.name}.orders" in found["sources"].sentence
    database.create_collection("orders")
    found = by_code(bridge)
    assert (found["images"].severity, found["sources"].severity) == (severity, "ok")
    # As it is printed: `db.getSiblingDB("NAME").runCommand({...})`.
    ((name, command),) = re.findall(r'db\.getSiblingDB\((".+?")\)\.runCommand\(({.+?}})\)', found["images"].sentence)
    database.client[json.loads(name)].command(json.loads(command))
    assert by_code(bridge)["images"].severity == "ok"


def test_a_check_finds_settings_that_break_a_bridge(make_bridge: MakeBridge, state_database: str) -> None:
    """A source in the state database feeds the bridge itself; eager tasks drop chains; pickle runs foreign code."""
    bridge = make_bridge(source=f"{state_database}.orders")
    bridge.app.conf.accept_content = ["json", "pickle"]
    bridge.app.conf.task_always_eager = True
    found = by_code(bridge)
    assert {found[code].severity for code in ("sources", "accept_content", "task_always_eager")} == {"failing"}


# -- with access control ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded(replica_set: object) -> Iterator[GuardedMongo]:
    """Give a mongod with access control; the session's set shows that there is a mongod at all."""
    del replica_set
    with GuardedMongo() as server:
        yield server


@pytest.mark.parametrize(
    ("reads", "writes", "oplog", "missing"),
    [
        (True, False, False, {"state_rights", "oplog_rights"}),
        (False, True, False, {"change_stream", "oplog_rights"}),
        (True, True, False, {"oplog_rights"}),
        (True, True, True, set()),
    ],
    ids=["reader", "stateful", "usual", "sufficient"],
)
def test_a_check_names_each_missing_right(
    guarded: GuardedMongo,
    make_bridge: MakeBridge,
    state_database: str,
    *,
    reads: bool,
    writes: bool,
    oplog: bool,
    missing: set[str],
) -> None:
    data, name = f"data_{state_database}", f"user_{state_database}"
    rights = [("read", data)] * reads + [("readWrite", state_database)] * writes + [("read", "local")] * oplog
    bridge = make_bridge(guarded.add_user(name, *rights), source=f"{data}.orders")
    findings = check(bridge.wiring)
    assert {each.code for each in findings if each.severity == "failing"} == missing
    assert all(f"{name}:" not in each.sentence for each in findings)
    if not oplog and writes:
        assert bridge.operations.read_status().oplog_seconds is None, "the rest of the status is there"


def test_a_check_names_missing_rights_on_the_state_also_without_sources(
    guarded: GuardedMongo, make_bridge: MakeBridge, state_database: str
) -> None:
    """P9: an app without handlers, or with a wrong source, has this problem, too; with the rights it has not."""
    for name, rights, severity in (("bare", "read", "failing"), ("full", "readWrite", "ok")):
        url = guarded.add_user(f"{name}_{state_database}", (rights, state_database))
        wrong = make_bridge(url, source=f"{state_database}.orders")
        empty = Bridge(Celery("empty", broker="memory://"), url, name=NAME, database=state_database)
        for bridge, reason in ((wrong, "sources"), (empty, "handlers")):
            found = by_code(bridge)
            assert (found[reason].severity, found["state_rights"].severity) == ("failing", severity), found


def test_a_wrong_password_is_named_without_it(
    guarded: GuardedMongo, make_bridge: MakeBridge, caplog: pytest.LogCaptureFixture
) -> None:
    """No retry, no traceback, no secret. A worker logs it when a message comes in: it has asked nothing before."""
    bridge = make_bridge(guarded.address_of("nobody"))
    with pytest.raises(AccessError) as caught:
        bridge.operations.read_status()
    assert "nobody" not in str(caught.value)
    signed = sign_run("run", Run("shop", "summarise", 1, 0, 1, 1, 1, carrier=Carrier("id")), bytes(32))
    assert bridge.wiring.of_process(WorkerRuntime).open("run", signed, None, Context()) is None
    assert [each.event for each in caplog.records if hasattr(each, "event")] == ["envelope_unverified"]
