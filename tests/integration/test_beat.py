"""The beat that fails over: one leads, each run is stored before it is sent, and nothing is sent by two leaders."""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis
from celery import Celery
from celery.schedules import crontab, schedule
from pymongo import MongoClient
from pymongo.collection import Collection

from mongo_celery import Bridge
from mongo_celery.beat import Scheduler
from mongo_celery.bridge.listener.renewal import Renewal
from mongo_celery.errors import ConfigurationError, DeploymentError, ForeignBridgeError
from tests.fixtures.process import wait_for
from tests.fixtures.proxy import Proxy
from tests.fixtures.redis import MakeRedis

Document = dict[str, Any]
MakeBeat = Callable[..., Scheduler]

TTL = 1.0
MINUTE = timedelta(minutes=1)
START = datetime(2026, 3, 1, 12, tzinfo=UTC)


class Clock:
    """The clock of a test's schedules, which only the test moves."""

    def __init__(self) -> None:
        self.time = START

    def now(self) -> datetime:
        return self.time


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make_beat(mongo_url: str, redis_url: str, state_database: str, clock: Clock) -> Iterator[MakeBeat]:
    """Give a function that makes a beat, by default with one entry that is due every minute."""
    with ExitStack() as stack:

        def make(entries: Mapping[str, Any] | None = None, **settings: Any) -> Scheduler:
            app = Celery("shop", broker=redis_url, set_as_current=False)
            app.conf.update(
                mongo_celery_database_url=mongo_url, mongo_celery_database=state_database, mongo_celery_lease_ttl=TTL
            )
            app.conf.update(settings)
            every_minute = schedule(MINUTE, nowfun=clock.now, app=app)
            app.conf.beat_schedule = entries or {"count": {"task": "shop.count", "schedule": every_minute}}
            beat = Scheduler(app)
            stack.enter_context(suppress(Exception))
            stack.callback(beat.close)
            return beat

        yield make


@pytest.fixture
def stored(mongo_client: MongoClient[Document], state_database: str) -> Collection[Document]:
    return mongo_client[state_database]["beat"]


def leads(beat: Scheduler) -> bool:
    """Take turns until nothing is due. Return True if this beat leads afterwards."""
    while beat.tick() == 0:
        pass
    return beat._renewal is not None


def freeze(beat: Scheduler) -> None:
    """End its renewals, as if its process was stopped or killed: its lease then expires."""
    assert beat._renewal is not None
    beat._renewal.stop()


def messages(url: str) -> list[Any]:
    """All messages in the default queue, the first one first."""
    with redis.Redis.from_url(url) as client:
        return [json.loads(each) for each in reversed(client.lrange("celery", 0, -1))]


def ids(url: str) -> list[str]:
    return [each["headers"]["id"] for each in messages(url)]


def events(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.event for each in caplog.records if each.name == "mongo_celery.beat"]  # type: ignore[attr-defined]


def test_one_leads_and_another_continues_where_it_ended(
    make_beat: MakeBeat, clock: Clock, redis_url: str, stored: Collection[Document], caplog: pytest.LogCaptureFixture
) -> None:
    """A released lease is free immediately. The last run is that of the earlier leader."""
    caplog.set_level(logging.INFO, "mongo_celery.beat")
    one, two = make_beat(), make_beat()
    assert [leads(one), leads(two)] == [True, False]
    clock.time += MINUTE
    assert [leads(one), leads(two)] == [True, False]
    assert len(messages(redis_url)) == 1

    one.close()
    one.close()
    for passed, count in ((0, 1), (60, 2), (1, 3)):  # the times of an hour are one run
        clock.time += passed * MINUTE
        assert leads(two)
        assert len(messages(redis_url)) == count
    entry = stored.find_one({"_id": "shop/count"}) or {}
    assert (entry["lastRunAt"].replace(tzinfo=UTC), entry["totalRunCount"]) == (clock.time, 3)
    assert "run" not in entry
    assert events(caplog) == ["beat_leading", "beat_standing_by", "beat_leading"]


@pytest.mark.parametrize("trusts", [False, True])
def test_a_frozen_leader_sends_nothing_when_it_resumes(
    make_beat: MakeBeat, clock: Clock, redis_url: str, trusts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if it still trusts its lease, as when it was frozen after it looked: the stored term refuses its run."""
    frozen, other = make_beat(), make_beat()
    assert leads(frozen)
    freeze(frozen)
    wait_for(lambda: leads(other))
    clock.time += MINUTE
    if trusts:
        renewal = frozen._renewal
        known = Renewal.is_trusted
        monkeypatch.setattr(Renewal, "is_trusted", lambda self: self is renewal or known(self))
    assert not leads(frozen)
    assert messages(redis_url) == []
    assert leads(other)
    assert not leads(frozen)
    assert len(messages(redis_url)) == 1


@pytest.mark.parametrize("is_sent", [False, True])
def test_the_next_leader_sends_a_stored_run_with_its_id(
    make_beat: MakeBeat,
    clock: Clock,
    redis_url: str,
    stored: Collection[Document],
    is_sent: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The leader dies before it sends a stored run, or after, before it has noted that."""

    def die(*_given: object) -> None:
        raise SystemExit

    dying, other = make_beat(), make_beat()
    assert leads(dying)
    clock.time += MINUTE
    died_at = "settle" if is_sent else "_open_producer"
    monkeypatch.setattr(dying._entries if is_sent else dying, died_at, die)
    with pytest.raises(SystemExit):
        leads(dying)
    freeze(dying)
    run = (stored.find_one({"_id": "shop/count"}) or {})["run"]["taskId"]
    assert ids(redis_url) == [run] * is_sent
    wait_for(lambda: leads(other))
    assert ids(redis_url) == [run] * (1 + is_sent)
    clock.time += MINUTE
    assert leads(other)
    assert len(set(ids(redis_url))) == 2


def test_without_the_broker_a_run_waits_and_keeps_its_id(
    make_beat: MakeBeat,
    clock: Clock,
    make_redis: MakeRedis,
    stored: Collection[Document],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Times that pass meanwhile are one more run. The beat leads all the time."""
    server = make_redis()
    beat = make_beat(broker_url=server.url)
    assert leads(beat)
    server.kill()
    clock.time += MINUTE
    assert leads(beat)
    run = (stored.find_one({"_id": "shop/count"}) or {})["run"]["taskId"]
    clock.time += 3 * MINUTE
    assert leads(beat)
    server.restart()
    wait_for(lambda: leads(beat) and len(messages(server.url)) == 2)
    assert ids(server.url)[0] == run
    assert (stored.find_one({"_id": "shop/count"}) or {})["totalRunCount"] == 2
    assert set(events(caplog)) == {"beat_run_unsent"}


def test_without_mongodb_nothing_is_sent(
    make_beat: MakeBeat, clock: Clock, redis_url: str, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    beat = make_beat(mongo_celery_database_url=proxy.mongo_url)
    assert leads(beat)
    clock.time += MINUTE
    proxy.refuse()
    wait_for(lambda: not leads(beat))
    assert messages(redis_url) == []
    assert {"beat_waiting", "beat_lost"} <= set(events(caplog))
    proxy.pass_through()
    wait_for(lambda: leads(beat))
    assert len(messages(redis_url)) == 1


def test_a_last_run_in_the_future_counts_as_now(
    make_beat: MakeBeat, clock: Clock, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The clock of the leader was a month ahead, or this clock goes back."""
    clock.time += timedelta(days=30)
    beat = make_beat()
    assert leads(beat)
    clock.time = START
    assert leads(beat)
    beat.close()
    other = make_beat()
    assert leads(other)
    assert messages(redis_url) == []
    clock.time += MINUTE
    assert leads(other)
    assert len(messages(redis_url)) == 1
    assert events(caplog) == ["beat_clock_wrong", "beat_clock_wrong"]


class OnTheHour(schedule):
    """A user's own schedule."""

    def is_due(self, last_run_at: datetime) -> tuple[bool, float]:  # type: ignore[override]
        now = self.now()
        return now.hour != last_run_at.hour, 3600.0 - now.minute * 60


def test_all_kinds_of_entries_are_sent_as_celery_sends_them(
    make_beat: MakeBeat, clock: Clock, redis_url: str, stored: Collection[Document]
) -> None:
    """With arguments and options; a disabled one is not sent."""
    clocked: Any = {"nowfun": clock.now}
    beat = make_beat(
        {
            "crontab": {
                "task": "shop.report",
                "schedule": crontab(minute="30", **clocked),
                "args": (1, "two"),
                "kwargs": {"three": 3},
                "options": {"expires": 60, "headers": {"of": "user"}},
            },
            "own": {"task": "shop.own", "schedule": OnTheHour(**clocked)},
            "relative": {"task": "shop.relative", "schedule": schedule(60 * MINUTE, relative=True, **clocked)},
            "off": {"task": "shop.off", "schedule": schedule(MINUTE, **clocked), "enabled": False},
        },
        timezone="Asia/Kolkata",
    )
    assert leads(beat)
    beat.app.add_periodic_task(60.0, beat.app.signature("shop.late"), name="a.name/with $signs")
    clock.time += timedelta(hours=8)
    beat.close()
    other = make_beat(dict(beat.app.conf.beat_schedule))
    assert leads(other)
    found = {each["headers"]["task"]: each for each in messages(redis_url)}
    assert found.keys() == {"shop.report", "shop.own", "shop.relative"}
    report = found["shop.report"]
    args, kwargs, _ = json.loads(base64.b64decode(report["body"]))
    assert (args, kwargs) == ([1, "two"], {"three": 3})
    assert report["headers"]["of"] == "user"
    assert report["headers"]["expires"]
    names = {each["entry"] for each in stored.find({"_id": {"$ne": "shop"}})}
    assert names == {"crontab", "own", "relative", "a.name/with $signs", "celery.backend_cleanup"}


def test_an_entry_keeps_its_last_run_through_a_deploy(
    make_beat: MakeBeat, clock: Clock, redis_url: str, stored: Collection[Document]
) -> None:
    """Older code without the entry leads for a while, then code with another schedule of the entry."""
    new = make_beat()
    assert leads(new)
    new.close()
    old = make_beat({"other": {"task": "shop.other", "schedule": schedule(MINUTE, nowfun=clock.now)}})
    assert leads(old)
    assert "removedAt" in (stored.find_one({"_id": "shop/count"}) or {})
    clock.time += timedelta(seconds=30)
    old.close()
    changed = make_beat(
        {"count": {"task": "shop.count", "schedule": schedule(timedelta(seconds=20), nowfun=clock.now)}}
    )
    assert leads(changed)
    assert [each["headers"]["task"] for each in messages(redis_url)] == ["shop.count"]
    assert "removedAt" not in (stored.find_one({"_id": "shop/count"}) or {})

    changed.close()
    stored.update_one({"_id": "shop/other"}, {"$set": {"removedAt": datetime.now(UTC) - timedelta(days=2)}})
    assert leads(make_beat())
    assert stored.count_documents({"_id": "shop/other"}) == 0


def test_a_run_that_cannot_be_sent_stops_no_other_entry(
    make_beat: MakeBeat, clock: Clock, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """P12: such as arguments that JSON cannot hold."""
    every_minute = schedule(MINUTE, nowfun=clock.now)
    beat = make_beat(
        {
            "broken": {"task": "shop.broken", "schedule": every_minute, "args": (object(),)},
            "also broken": {"task": "shop.broken", "schedule": every_minute, "args": (object(),)},
            "sound": {"task": "shop.sound", "schedule": every_minute},
        }
    )
    assert leads(beat)
    for count in (1, 2, 3):
        clock.time += MINUTE
        assert leads(beat)
        assert [each["headers"]["task"] for each in messages(redis_url)] == ["shop.sound"] * count
    reported = {getattr(each, "entry", None) for each in caplog.records if each.name == "mongo_celery.beat"}
    assert reported == {"broken", "also broken"}


def test_another_environment_is_refused(make_beat: MakeBeat, redis_url: str, stored: Collection[Document]) -> None:
    """Also while no beat of the first one runs. Without the stored identity it may lead."""
    one = make_beat()
    assert leads(one)
    other = make_beat(broker_url=redis_url.removesuffix("/0") + "/1")
    with pytest.raises(ForeignBridgeError):
        other.tick()
    one.close()
    with pytest.raises(ForeignBridgeError):
        other.tick()
    stored.update_one({"_id": "shop"}, {"$unset": {"identity": 1}})
    assert leads(other)


def test_what_cannot_lead_is_refused(make_beat: MakeBeat, redis_url: str, mongo_url: str, standalone_url: str) -> None:
    """An app without MongoDB or a name, an entry whose name cannot be stored, and a standalone server."""
    for app in (
        Celery("shop", broker=redis_url, set_as_current=False),
        Celery(broker=redis_url, set_as_current=False, mongo_celery_database_url=mongo_url),
    ):
        with pytest.raises(ConfigurationError):
            Scheduler(app, lazy=True)
    for name in ("", 1):
        with pytest.raises(ConfigurationError):
            make_beat({name: {"task": "shop.count", "schedule": 60.0}})
    with pytest.raises(DeploymentError):
        make_beat(mongo_celery_database_url=standalone_url).tick()


def test_a_run_that_cannot_be_sent_delays_no_stored_run(
    make_beat: MakeBeat, clock: Clock, make_redis: MakeRedis
) -> None:
    """Both wait after an outage, and each turn would try the broken one first."""
    server, every_minute = make_redis(), schedule(MINUTE, nowfun=clock.now)
    entries = {
        "broken": {"task": "shop.broken", "schedule": every_minute, "args": (object(),)},
        "sound": {"task": "shop.sound", "schedule": every_minute},
    }
    beat = make_beat(entries, broker_url=server.url)
    assert leads(beat)
    server.kill()
    clock.time += MINUTE
    assert leads(beat)
    server.restart()
    beat._runs = {name: beat._runs[name] for name in entries}

    def is_sent() -> bool:
        beat._runs["broken"].retry_at = 0.0  # as after the pause of a beat with few entries
        beat.tick()
        return messages(server.url) != []

    wait_for(is_sent)


def test_a_bridge_names_the_state(mongo_url: str, redis_url: str, stored: Collection[Document]) -> None:
    app = Celery("shop", broker=redis_url, set_as_current=False)
    Bridge(app, mongo_url, name="bridge", database=stored.database.name)
    beat = Scheduler(app)
    assert leads(beat)
    assert stored.find_one({"_id": "bridge"})
    beat.close()
