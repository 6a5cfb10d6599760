"""
The listener as a process, with real workers, a real broker and a load: what it survives, and how soon.

Each test ends in `settle`: it waits until everything is done and judges the whole history (no loss, order
per key, no stale write, monotone numbers and tokens, watermarks over a prefix only, bounded duplicates).
"""

from __future__ import annotations

import json
import logging
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
from pymongo import MongoClient

from mongo_celery.bridge.options import BridgeOptions
from mongo_celery.bridge.partitioning import partition_hash
from mongo_celery.bridge.state.store import Store
from mongo_celery.embedded import MongoReplicaSet, RedisServer
from mongo_celery.embedded.server import free_port
from tests.acceptance.scene import KEYS, LEASE_TTL, TAKE_OVER_SECONDS_MAX, Scene, now
from tests.chaos.history import going_back, longest_gap, lost, shared_versions, stale, weak_tokens
from tests.fixtures.process import Processes, ProjectProcess, wait_for
from tests.fixtures.proxy import Proxy
from tests.fixtures.rights import DATA, STATE, UrlOf, with_a_wrong_password

Document = dict[str, Any]
logger = logging.getLogger(__name__)

Failpoint = Callable[..., AbstractContextManager[None]]
LONG_TTL = 40.0


@pytest.fixture
def scene(processes: Processes, mongo_client: MongoClient[Document], mongo_url: str, redis_url: str) -> Iterator[Scene]:
    with Scene(processes, mongo_client, mongo_url, redis_url) as scene:
        yield scene


def test_a_standby_takes_over_when_the_leader_is_killed_under_load(scene: Scene) -> None:
    """P7, P1, P2, P5: SIGKILL of the leader; the standby dispatches soon, and nothing is lost."""
    leader, _ = scene.pair()
    with scene.load():
        scene.flows()
        at = now()
        leader.kill()
        seconds = scene.resumed_after(at)
        scene.flows()
    logger.info("take-over after SIGKILL: %.2f s", seconds)
    assert seconds < TAKE_OVER_SECONDS_MAX
    scene.settle(faults=1)


def test_a_regular_stop_hands_over_at_once_and_repeats_no_running_handler(scene: Scene) -> None:
    """P7, P6: SIGTERM while a long handler runs; the gap is short, and the handler is adopted, not repeated."""
    leader, _ = scene.pair(workers=2, lease_ttl=LONG_TTL)
    with scene.load():
        scene.write("slow")
        wait_for(lambda: any(start.key == "slow" for start in scene.starts))
        scene.flows()
        at = now()
        status = leader.terminate()
        seconds = scene.resumed_after(at)
        scene.flows()
        gap = longest_gap(scene.watcher.history, at - 1, now())
        scene.open_gate("slow")
    logger.info("hand-over after SIGTERM: %.2f s, longest gap %.2f s", seconds, gap)
    assert status == 0
    assert gap < LONG_TTL / 2, "nobody waited for the lease to lapse"
    scene.settle(faults=0)


@pytest.mark.slow  # it judges seconds, so it wants a machine of its own: `pytest -m slow`
def test_the_gap_keeps_its_published_bounds(scene: Scene) -> None:
    """P7: the ttl + 2 s after SIGKILL; 1.5 s after SIGTERM."""
    leader, standby = scene.pair()
    with scene.load():
        scene.flows()
        at = now()
        leader.kill()
        assert scene.resumed_after(at) < LEASE_TTL + 2
        scene.flows()
        scene.listener("third").wait_for_output("standing by")
        at = now()
        assert standby.terminate() == 0
        scene.flows()
        assert longest_gap(scene.watcher.history, at - 1, now()) < 1.5
    scene.settle(faults=1)


def test_a_frozen_leader_stands_by_when_it_wakes_and_can_lead_again(scene: Scene) -> None:
    """P3, P7: SIGSTOP beyond the ttl, then SIGCONT: the old leader steps down, lives, and later leads anew."""
    first, second = scene.pair()
    with scene.load():
        scene.flows()
        at = now()
        first.pause()
        assert scene.resumed_after(at) < TAKE_OVER_SECONDS_MAX
        scene.flows()
        first.resume()
        first.wait_for_output("the lease is lost; standing by")
        scene.flows()
        at = now()
        second.kill()
        assert scene.resumed_after(at) < TAKE_OVER_SECONDS_MAX
        scene.flows()
    assert first.running
    assert first.text.count("leading bridge") == 2
    scene.settle(faults=2)


def test_what_a_frozen_leader_had_on_its_way_is_refused(
    scene: Scene, redis_server: RedisServer, make_proxy: Callable[[int], Proxy]
) -> None:
    """P3, P8: a dispatch that was held in the network until another one leads starts nothing."""
    proxy = make_proxy(redis_server.port)
    worker = scene.worker()
    zombie = scene.leader("zombie", added={"PROJECT_BROKER": proxy.redis_url})
    worker.wait_for_output("ready")
    scene.write("first")
    scene.settle()
    proxy.hold(b"LPUSH")
    scene.write("held")
    proxy.wait_until_held()
    zombie.pause()
    both = f"{redis_server.url};{proxy.redis_url}"  # a broker under two addresses: it stays the same one
    scene.leader("second", added={"PROJECT_BROKER": both})
    wait_for(lambda: any(start.key == "held" for start in scene.starts))
    scene.write("held", "held")
    scene.settle()
    proxy.release()
    zombie.resume()
    zombie.wait_for_output("the lease is lost; standing by")
    scene.write("last")
    scene.settle(faults=0)


def test_two_listeners_that_start_at_the_same_instant_are_one_leader_and_one_standby(scene: Scene) -> None:
    """P3: on an empty state database; the loser neither fails nor leads."""
    leader, standby = scene.pair()
    scene.write("one", "two")
    scene.settle()
    assert len(scene.terms) == 1
    assert leader.terminate() == standby.terminate() == 0


def test_oldest_delivers_what_was_written_before_the_first_start(scene: Scene) -> None:
    """P1: pinned at the oldest oplog entry, and printed with its age."""
    scene.write("early", "early", "other")
    listener = scene.leader()
    listener.wait_for_output(r"starts for the first time, at .*oldest, \d+ s ago")
    scene.worker()
    scene.settle()


def test_now_delivers_what_is_written_from_the_first_start_on(scene: Scene) -> None:
    """P1: nothing from before; everything from the pin on, though its holder was killed before the first commit."""
    scene.write("early", "other")
    first = scene.leader("first", start_from="now")
    first.kill()
    pinned = scene.lease()["startAtOperationTime"]
    scene.write("early", "late")
    scene.leader("second", start_from="now")
    assert scene.lease()["startAtOperationTime"] == pinned
    scene.worker()
    scene.handlers = {"record": scene.last_place_before("late", 1, more=1)}
    scene.settle()
    assert {(start.key, start.n) for start in scene.starts} == {("early", 2), ("late", 1)}


def test_a_time_delivers_what_was_written_from_then_on(scene: Scene) -> None:
    """P1: a start in the past, as a bson Timestamp."""
    scene.write("early")
    time = scene.client.admin.command("ping")["operationTime"]
    scene.write("late", "early")
    scene.leader(start_from=[time.time, time.inc + 1])
    scene.worker()
    scene.handlers = {"record": scene.last_place_before("late", 1)}
    scene.settle()
    assert {(start.key, start.n) for start in scene.starts} == {("early", 2), ("late", 1)}


@pytest.mark.slow
def test_a_changed_layout_keeps_the_order_of_each_key_across_a_crash(scene: Scene) -> None:
    """P2: four partitions, then seven, then three, under load, with SIGKILL while the old ones are drained."""
    scene.worker()
    leader = scene.leader(partitions=4)
    with scene.load():
        scene.flows()
        scene.write("slow")  # it stands at its gate, so the old partitions are not drained before the kill
        wait_for(lambda: any(start.key == "slow" for start in scene.starts))
        leader.kill()
        drained = scene.listener("drained", partitions=7)
        drained.wait_for_output("leading bridge")
        drained.kill()
        seven = scene.listener("seven", partitions=7)
        scene.open_gate("slow")
        seven.wait_for_output("partitioning of record changed: generation [0-9]+, 7 partitions")
        scene.flows()
        seven.terminate()
        scene.listener("three", partitions=3).wait_for_output(
            "partitioning of record changed: generation [0-9]+, 3 partitions"
        )
        scene.flows()
    scene.settle(faults=4)


def test_a_layout_changes_around_a_handler_that_runs_and_one_that_died(scene: Scene) -> None:
    """P2, P6: the old layout is drained up to what runs; what died behind that place belongs to the new one."""
    scene.worker("worker")
    leader = scene.leader(partitions=4)
    scene.write("before", "slow")
    wait_for(lambda: any(start.key == "slow" for start in scene.starts))
    leader.terminate()
    scene.write(*KEYS, *KEYS)
    seven = scene.leader("seven", partitions=7)
    seven.wait_for_output("record waits for its 7 partitions: .* partition [0-9]+ runs in")
    assert "partitioning of record changed" not in seven.text, "it waits for what runs"
    scene.open_gate("slow")
    seven.wait_for_output("partitioning of record changed: generation [0-9]+, 7 partitions")
    scene.settle(faults=0)


def test_a_layout_changes_although_a_worker_died_in_the_middle_of_a_change(scene: Scene) -> None:
    """P1: its claim lapses behind the place up to which the old partitions are drained, and is ended."""
    worker = scene.worker("worker")
    leader = scene.leader(partitions=4)
    scene.write("before", "slow")
    wait_for(lambda: any(start.key == "slow" for start in scene.starts))
    # A transaction of a killed process keeps its locks for a minute: let the other handler end first.
    wait_for(lambda: any(effect.key == "before" for effect in scene.effects))
    worker.send_group(signal.SIGKILL)
    leader.terminate()
    scene.write(*KEYS)
    scene.open_gate("slow")
    scene.worker("another")
    scene.listener("three", partitions=3).wait_for_output(
        "partitioning of record changed: generation [0-9]+, 3 partitions"
    )
    scene.settle(faults=1)


@pytest.mark.slow
def test_blocked_partitions_keep_the_old_ones_while_all_else_goes_on(scene: Scene) -> None:
    """P2, P9, P12, P13: 4, then 7 partitions; one has halted with 1 500 changes after it, one waits an hour."""
    both = {"PROJECT_HANDLERS": "audit"}
    scene.handlers = {"record": "", "audit": ""}
    scene.worker(added=both)
    options: dict[str, Any] = {"spill_after": 0.5, "run_size": 50, "added": both}
    leader = scene.leader(partitions=4, **options)
    with scene.load():
        scene.flows()
        halting, parking = _apart(scene, 4, "halting", "parking")
        scene.write(halting, parking)
        wait_for(lambda: _blocked(scene, {"state": "halted"}))
        wait_for(lambda: _blocked(scene, {"retry.count": 1, "retry.notBefore": {"$ne": None}}))
        scene.write(*[halting] * 1500)
        wait_for(lambda: scene.state["backlog"].count_documents({}) > 1400, message="blocked changes are stored")
        leader.terminate()
        leader = scene.leader("leader7", partitions=7, **options)
        leader.wait_for_output("partitioning of audit changed: generation [0-9]+, 7 partitions")
        leader.wait_for_output("record waits for its 7 partitions: partition [0-9] is (halted|retrying)")
        _flows(scene, "audit")
        _flows(scene, "record")
    scene.open_gate(halting)
    scene.open_gate(parking)
    while _blocked(scene, {"state": "halted"}) or _blocked(scene, {"retry.count": 1}):
        _retry_all(scene)
    leader.wait_for_output("partitioning of record changed: generation [0-9]+, 7 partitions")
    wait_for(lambda: _generations(scene) == 2, message="former partitions are removed")
    scene.settle(300, faults=5)


def _apart(scene: Scene, partitions: int, *kinds: str) -> list[str]:
    """Keys of these kinds, each in a partition of its own."""
    keys: dict[int, str] = {}
    for kind in kinds:
        found = [f"{kind} {number}" for number in range(100)]
        index_of = {key: partition_hash([f"{scene.names}_data", "items", key]) % partitions for key in found}
        key = next(key for key in found if index_of[key] not in keys)
        keys[index_of[key]] = key
    return list(keys.values())


def _in_force(scene: Scene, name: str) -> str:
    found = scene.state["handlers"].find_one({"_id": f"project/{name}"}) or {}
    return f"project/{name}/{found['partitioning']['term']}/"


def _blocked(scene: Scene, query: dict[str, Any]) -> dict[str, Any] | None:
    """A partition in force of which this is so."""
    return scene.state["partitions"].find_one({"_id": {"$regex": f"^{_in_force(scene, 'record')}"}, **query})


def _generations(scene: Scene) -> int:
    ids = [each["_id"] for name in ("partitions", "backlog") for each in scene.state[name].find({}, {"_id": 1})]
    return len({tuple(each.split("/")[1:3]) for each in ids})


def _flows(scene: Scene, name: str) -> None:
    count = len([each for each in scene.starts if each.handler == name])
    wait_for(lambda: len([each for each in scene.starts if each.handler == name]) > count + 10, message=f"{name} flows")


def _retry_all(scene: Scene) -> None:
    store = Store(scene.client, BridgeOptions(name="project", database=scene.state.name))
    generation = int(_in_force(scene, "record").split("/")[2])
    for image in store.partitions.of({"record": generation}):
        if image.state == "halted" or image.parked:
            assert store.partitions.retry(image, generation)


@pytest.mark.parametrize(
    "start", [None, "now", *(pytest.param(each, marks=pytest.mark.slow) for each in ("oldest", "a time"))], ids=str
)
def test_a_handler_that_is_added_later_begins_where_its_start_says(scene: Scene, start: str | None) -> None:
    """P1: its own, else the bridge's; it says so, it misses nothing from there on, and no other handler repeats."""
    scene.write("early")
    first = scene.leader("first")
    working = scene.worker("first-worker")
    scene.settle()
    for each in (first, working):
        each.terminate()
    time = scene.client.admin.command("ping")["operationTime"]
    scene.write("away")
    own = [time.time, time.inc + 1] if start == "a time" else start
    both = {"PROJECT_HANDLERS": "audit", "PROJECT_AUDIT": json.dumps(own)}
    listener = scene.leader("second", added=both)
    said = "as the bridge's start_from says (oldest)" if own is None else "as its start_from says"
    listener.wait_for_output(f"handler audit is new: it begins {re.escape(said)}")
    scene.write("late", "early")
    scene.worker("second-worker", added=both)
    missing = {"now": [("early", 1), ("away", 1)], "a time": [("early", 1)]}.get(start or "", [])
    place = scene.last_place_before("late", 1) if start == "now" else ""
    place = scene.last_place_before("away", 1) if start == "a time" else place
    scene.handlers = {"record": "", "audit": place}
    scene.settle()
    everything = {("early", 1), ("away", 1), ("late", 1), ("early", 2)}
    assert {(fact.key, fact.n) for fact in scene.starts if fact.handler == "audit"} == everything - set(missing)
    assert len([fact for fact in scene.starts if fact.handler == "record"]) == len(everything)


def test_a_dropped_state_database_is_made_anew_and_no_version_is_reused(scene: Scene) -> None:
    """P4, P9: the leader steps down loudly, a new term begins from the start point, with larger versions and fences."""
    leader, standby = scene.pair()
    with scene.load():
        scene.flows()
        scene.client.drop_database(scene.state)
        wait_for(lambda: "the lease is lost; standing by" in leader.text + standby.text)
        wait_for(lambda: len(scene.terms) == 2)
        scene.flows()
    wait_for(lambda: not lost(scene.watcher.history, scene.handlers))
    assert leader.running
    assert standby.running
    history = list(scene.watcher.history)
    for check in (shared_versions, going_back, stale, weak_tokens):
        assert check(history) == []


def test_a_stepdown_of_the_primary_under_load_loses_nothing(
    processes: Processes, make_replica_set: Callable[..., MongoReplicaSet], redis_url: str
) -> None:
    """P1, P2: listener, workers and load all wait for the new primary, and go on."""
    servers = make_replica_set()
    with MongoClient[Document](servers.url) as client, Scene(processes, client, servers.url, redis_url) as scene:
        scene.pair()
        with scene.load():
            scene.flows()
            step_down = {"replSetStepDown": 2, "secondaryCatchUpPeriodSecs": 1, "force": True}
            client.admin.command(step_down)
            at = now()
            scene.flows()
            logger.info("step-down of the primary: gap %.2f s", longest_gap(scene.watcher.history, at, now()))
        scene.settle(faults=2)


def test_a_term_that_fails_at_once_is_not_begun_again_at_once(scene: Scene, failpoint: Failpoint) -> None:
    """P9: no hot loop of acquisitions; when the cause is gone all goes on."""
    with failpoint(failCommands=["insert"], errorCode=112, appName="mongo_celery"):
        listener = scene.listener()
        wait_for(lambda: len(scene.terms) >= 4)
    times = [term.at for term in scene.terms[:4]]
    assert times[-1] - times[0] > 3 * 0.2
    listener.wait_for_output("reading from")
    scene.worker()
    scene.write("one")
    scene.settle()


def test_a_right_that_is_missed_in_the_middle_ends_with_one_sentence(scene: Scene, failpoint: Failpoint) -> None:
    """P9: also where the lease could be written, and the partitions cannot."""
    with failpoint(failCommands=["insert"], errorCode=13, appName="mongo_celery"):
        _refused(scene.listener(), "readWrite")
    assert scene.lease()["state"] == "failed"


def test_a_bridge_that_watches_its_own_state_is_refused(scene: Scene) -> None:
    """P6, P9: found when the listener starts."""
    _refused(scene.listener(added={"PROJECT_STATE": f"{scene.names}_data"}), "Choose another database for the state")


def test_a_standalone_server_ends_with_one_sentence(scene: Scene, standalone_url: str) -> None:
    """P9: the topology, and how to get the right one."""
    _refused(scene.listener(added={"PROJECT_MONGO": standalone_url}), "--replSet")


@pytest.mark.parametrize(
    ("user", "words"),
    [
        ("without_stream", "grant the actions changeStream and find"),
        ("without_oplog", "serverStatus on the cluster, or set start_from"),
        ("without_state", "readWrite"),
    ],
)
def test_a_missing_right_ends_with_one_sentence(scene: Scene, guarded_url: UrlOf, user: str, words: str) -> None:
    """P9: the right is named."""
    rights = {"PROJECT_MONGO": guarded_url(user), "PROJECT_DATA": DATA, "PROJECT_STATE": STATE}
    with MongoClient[Document](guarded_url("admin")) as client:
        client.drop_database(STATE)
    _refused(scene.listener(added=rights), words)


def test_a_refused_login_ends_with_one_sentence_that_calls_it_one(scene: Scene, guarded_url: UrlOf) -> None:
    """P9: nobody can cure a mistyped password by granting rights."""
    listener = scene.listener(added={"PROJECT_MONGO": with_a_wrong_password(guarded_url("bridge"))})
    _refused(listener, "refused the login; check user, password and authSource")
    assert "lacks a right" not in listener.text


def test_servers_that_stay_away_end_with_one_sentence_after_the_stated_time(scene: Scene) -> None:
    """P9: waits with a message, then gives up."""
    nowhere = f"mongodb://127.0.0.1:{free_port()}/?replicaSet=rs0"
    listener = scene.listener(added={"PROJECT_MONGO": nowhere}, start_timeout=2)
    listener.wait_for_output("waiting for MongoDB")
    _refused(listener, r"MongoDB gave no answer within 2 s \(start_timeout\)")


def test_a_frozen_broker_ends_with_one_sentence_after_the_stated_time(
    scene: Scene, make_redis: Callable[..., RedisServer]
) -> None:
    """P9: a broker that accepts connections and never answers does not hold the listener for ever."""
    redis = make_redis()
    redis.pause()
    listener = scene.listener(added={"PROJECT_BROKER": redis.url}, start_timeout=4)
    listener.wait_for_output("waiting for the broker")
    _refused(listener, r"the broker gave no answer within 4 s \(start_timeout\)")
    redis.resume()


def test_a_broker_that_is_down_at_the_start_is_waited_for(scene: Scene, make_redis: Callable[..., RedisServer]) -> None:
    """P9, P8: the lease is not held by one who cannot dispatch; when the broker comes all goes on."""
    port = free_port()
    broker = {"PROJECT_BROKER": f"redis://127.0.0.1:{port}/0"}
    listener = scene.listener(added=broker)
    listener.wait_for_output("waiting for the broker")
    assert scene.terms == []
    scene.write("early")
    make_redis(port=port)
    scene.worker(added=broker)
    scene.settle()


def _refused(listener: ProjectProcess, words: str) -> None:
    status = listener.wait()
    assert status == 1
    assert len(re.findall(words, listener.text)) in {1, 2}, f"once, and once in the log: {listener.text}"
    assert "Traceback" not in listener.text
