"""The beat that fails over: one leads, each run is stored before it is sent, and nothing is sent by two leaders."""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
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

TTL = 30.0
"""Seconds. A call may take a part of it. A lease that is to be lost is ended by the test."""
MINUTE = timedelta(minutes=1)
START = datetime(2026, 3, 1, 12, tzinfo=UTC)


class Beats:
    """Beats of one app, what they store and send, and the clock of their schedules, which only the test moves."""

    def __init__(self, mongo_url: str, redis_url: str, stored: Collection[Document], stack: ExitStack) -> None:
        self.stored, self.time = stored, START
        self._mongo_url, self._redis_url, self._stack = mongo_url, redis_url, stack

    def now(self) -> datetime:
        return self.time

    def every(self, run_every: timedelta) -> schedule:
        return schedule(run_every, nowfun=self.now)

    def make(self, entries: Mapping[str, Any] | None = None, **settings: Any) -> Scheduler:
        """Make a beat, by default with one entry that is due every minute."""
        app = Celery("shop", broker=self._redis_url, set_as_current=False)
        app.conf.update(
            mongo_celery_database_url=self._mongo_url,
            mongo_celery_database=self.stored.database.name,
            mongo_celery_lease_ttl=TTL,
        )
        app.conf.update(settings)
        app.conf.beat_schedule = entries or {"count": {"task": "shop.count", "schedule": self.every(MINUTE)}}
        beat = Scheduler(app)
        self._stack.enter_context(suppress(Exception))
        self._stack.callback(beat.close)
        return beat

    def messages(self, url: str | None = None) -> list[Any]:
        """Return all messages in the default queue, the first one first."""
        with redis.Redis.from_url(url or self._redis_url) as client:
            return [json.loads(each) for each in reversed(client.lrange("celery", 0, -1))]

    def ids(self, url: str | None = None) -> list[str]:
        return [each["headers"]["id"] for each in self.messages(url)]

    @property
    def tasks(self) -> list[str]:
        return [each["headers"]["task"] for each in self.messages()]

    @property
    def entry(self) -> Document:
        """The entry of the default schedule, as it is stored."""
        return self.stored.find_one({"_id": "shop/count"}) or {}


@pytest.fixture
def beats(mongo_url: str, redis_url: str, mongo_client: MongoClient[Document], state_database: str) -> Iterator[Beats]:
    with ExitStack() as stack:
        yield Beats(mongo_url, redis_url, mongo_client[state_database]["beat"], stack)


def leads(beat: Scheduler) -> bool:
    """Take turns until nothing is due. Return True if this beat leads afterwards."""
    while beat.tick() == 0:
        pass
    return beat._renewal is not None


def freeze(beats: Beats, beat: Scheduler) -> None:
    """End its renewals and its lease, as if its process was stopped or killed for longer than the lease lives."""
    renewal = beat._renewal
    assert renewal is not None
    renewal.stop()
    renewal._term = replace(renewal.term, trusted_until=0.0)
    beats.stored.update_one({"_id": "shop"}, [{"$set": {"expiresAt": {"$subtract": ["$$NOW", 1]}}}])


def events(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.event for each in caplog.records if each.name == "mongo_celery.beat"]  # type: ignore[attr-defined]


def test_one_leads_and_another_continues_where_it_ended(beats: Beats, caplog: pytest.LogCaptureFixture) -> None:
    """A released lease is free immediately. The last run is that of the earlier leader."""
    caplog.set_level(logging.INFO, "mongo_celery.beat")
    one, two = beats.make(), beats.make()
    assert [leads(one), leads(two)] == [True, False]
    beats.time += MINUTE
    assert [leads(one), leads(two)] == [True, False]
    assert len(beats.messages()) == 1

    one.close()
    one.close()
    for passed, count in ((0, 1), (60, 2), (1, 3)):  # the times of an hour are one run
        beats.time += passed * MINUTE
        assert leads(two)
        assert len(beats.messages()) == count
    entry = beats.entry
    assert (entry["lastRunAt"].replace(tzinfo=UTC), entry["totalRunCount"]) == (beats.time, 3)
    assert "run" not in entry
    assert events(caplog) == ["beat_leading", "beat_standing_by", "beat_leading"]


@pytest.mark.parametrize("trusts", [False, True])
def test_a_frozen_leader_sends_nothing_when_it_resumes(
    beats: Beats, trusts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if it still trusts its lease, as when it was frozen after it looked: the stored term refuses its run."""
    frozen, other = beats.make(), beats.make()
    assert leads(frozen)
    freeze(beats, frozen)
    assert leads(other)
    beats.time += MINUTE
    if trusts:
        renewal = frozen._renewal
        known = Renewal.is_trusted
        monkeypatch.setattr(Renewal, "is_trusted", lambda self: self is renewal or known(self))
    assert not leads(frozen)
    assert beats.messages() == []
    assert leads(other)
    assert not leads(frozen)
    assert len(beats.messages()) == 1


@pytest.mark.parametrize("is_sent", [False, True])
def test_the_next_leader_sends_a_stored_run_with_its_id(
    beats: Beats, is_sent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader dies before it sends a stored run, or after, before it has noted that."""

    def die(*_given: object) -> None:
        raise SystemExit

    dying, other = beats.make(), beats.make()
    assert leads(dying)
    beats.time += MINUTE
    died_at = "settle" if is_sent else "_open_producer"
    monkeypatch.setattr(dying._entries if is_sent else dying, died_at, die)
    with pytest.raises(SystemExit):
        leads(dying)
    freeze(beats, dying)
    run = beats.entry["run"]["taskId"]
    assert beats.ids() == [run] * is_sent
    assert leads(other)
    assert beats.ids() == [run] * (1 + is_sent)
    beats.time += MINUTE
    assert leads(other)
    assert len(set(beats.ids())) == 2


def test_without_the_broker_a_run_waits_and_keeps_its_id(
    beats: Beats, make_redis: MakeRedis, caplog: pytest.LogCaptureFixture
) -> None:
    """Times that pass meanwhile are one more run. The beat leads all the time."""
    server = make_redis()
    beat = beats.make(broker_url=server.url)
    assert leads(beat)
    server.kill()
    beats.time += MINUTE
    assert leads(beat)
    run = beats.entry["run"]["taskId"]
    beats.time += 3 * MINUTE
    assert leads(beat)
    server.restart()
    wait_for(lambda: leads(beat) and len(beats.messages(server.url)) == 2)
    assert beats.ids(server.url)[0] == run
    assert beats.entry["totalRunCount"] == 2
    assert set(events(caplog)) == {"beat_run_unsent"}


def test_without_mongodb_nothing_is_sent(beats: Beats, proxy: Proxy, caplog: pytest.LogCaptureFixture) -> None:
    beat = beats.make(mongo_celery_database_url=proxy.mongo_url, mongo_celery_lease_ttl=2.0)
    wait_for(lambda: leads(beat))  # MongoDB may be slow behind the proxy
    beats.time += MINUTE
    proxy.refuse()
    wait_for(lambda: not leads(beat) and {"beat_waiting", "beat_lost"} <= set(events(caplog)))
    assert beats.messages() == []
    proxy.pass_through()
    wait_for(lambda: leads(beat) and beats.messages())
    assert len(set(beats.ids())) == 1


def test_a_last_run_in_the_future_counts_as_now(beats: Beats, caplog: pytest.LogCaptureFixture) -> None:
    """The clock of the leader was a month ahead, or this clock goes back."""
    beats.time += timedelta(days=30)
    beat = beats.make()
    assert leads(beat)
    beats.time = START
    assert leads(beat)
    beat.close()
    other = beats.make()
    assert leads(other)
    assert beats.messages() == []
    beats.time += MINUTE
    assert leads(other)
    assert len(beats.messages()) == 1
    assert events(caplog) == ["beat_clock_wrong", "beat_clock_wrong"]


class OnTheHour(schedule):
    """A user's own schedule."""

    def is_due(self, last_run_at: datetime) -> tuple[bool, float]:  # type: ignore[override]
        now = self.now()
        return now.hour != last_run_at.hour, 3600.0 - now.minute * 60


def test_all_kinds_of_entries_are_sent_as_celery_sends_them(beats: Beats) -> None:
    clocked: Any = {"nowfun": beats.now}
    given = {"args": (1, "two"), "kwargs": {"three": 3}, "options": {"expires": 60, "headers": {"of": "user"}}}
    beat = beats.make(
        {
            "crontab": {"task": "shop.report", "schedule": crontab(minute="30", **clocked), **given},
            "own": {"task": "shop.own", "schedule": OnTheHour(**clocked)},
            "relative": {"task": "shop.relative", "schedule": schedule(60 * MINUTE, relative=True, **clocked)},
            "off": {"task": "shop.off", "schedule": schedule(MINUTE, **clocked), "enabled": False},
        },
        timezone="Asia/Kolkata",
    )
    assert leads(beat)
    beat.app.add_periodic_task(60.0, beat.app.signature("shop.late"), name="a.name/with $signs")
    beats.time += timedelta(hours=8)
    beat.close()
    other = beats.make(dict(beat.app.conf.beat_schedule))
    assert leads(other)
    found = {each["headers"]["task"]: each for each in beats.messages()}
    assert found.keys() == {"shop.report", "shop.own", "shop.relative"}
    report = found["shop.report"]
    args, kwargs, _ = json.loads(base64.b64decode(report["body"]))
    assert (args, kwargs) == ([1, "two"], {"three": 3})
    assert report["headers"]["of"] == "user"
    assert report["headers"]["expires"]
    names = {each["entry"] for each in beats.stored.find({"_id": {"$ne": "shop"}})}
    assert names == {"crontab", "own", "relative", "a.name/with $signs", "celery.backend_cleanup"}


def test_an_entry_keeps_its_last_run_through_a_deploy(beats: Beats) -> None:
    """Older code without the entry leads for a while, then code with another schedule of the entry."""
    new = beats.make()
    assert leads(new)
    new.close()
    old = beats.make({"other": {"task": "shop.other", "schedule": beats.every(MINUTE)}})
    assert leads(old)
    assert "removedAt" in beats.entry
    beats.time += timedelta(seconds=30)
    old.close()
    changed = beats.make(
        {"count": {"task": "shop.count", "schedule": schedule(timedelta(seconds=20), nowfun=beats.now)}}
    )
    assert leads(changed)
    assert beats.tasks == ["shop.count"]
    assert "removedAt" not in beats.entry

    changed.close()
    beats.stored.update_one({"_id": "shop/other"}, {"$set": {"removedAt": datetime.now(UTC) - timedelta(days=2)}})
    assert leads(beats.make())
    assert beats.stored.count_documents({"_id": "shop/other"}) == 0


def broken_and_sound(beats: Beats) -> tuple[Document, Document]:
    """Two entries for each minute, one of them with arguments that JSON cannot hold."""
    every_minute = {"schedule": beats.every(MINUTE)}
    return {"task": "broken", "args": (object(),), **every_minute}, {"task": "sound", **every_minute}


def test_a_run_that_cannot_be_sent_stops_no_other_entry(beats: Beats, caplog: pytest.LogCaptureFixture) -> None:
    """P12."""
    broken, sound = broken_and_sound(beats)
    beat = beats.make({"broken": broken, "also broken": broken, "sound": sound})
    assert leads(beat)
    for count in (1, 2, 3):
        beats.time += MINUTE
        assert leads(beat)
        assert beats.tasks == ["sound"] * count
    reported = {getattr(each, "entry", None) for each in caplog.records if each.name == "mongo_celery.beat"}
    assert reported == {"broken", "also broken"}


def test_another_environment_is_refused(beats: Beats, redis_url: str) -> None:
    """Also while no beat of the first one runs. Without the stored identity it may lead."""
    one = beats.make()
    assert leads(one)
    other = beats.make(broker_url=redis_url.removesuffix("/0") + "/1")
    with pytest.raises(ForeignBridgeError):
        other.tick()
    one.close()
    with pytest.raises(ForeignBridgeError):
        other.tick()
    beats.stored.update_one({"_id": "shop"}, {"$unset": {"identity": 1}})
    assert leads(other)


def test_what_cannot_lead_is_refused(beats: Beats, redis_url: str, mongo_url: str, standalone_url: str) -> None:
    """An app without MongoDB or a name, an entry whose name cannot be stored, and a standalone server."""
    for app in (
        Celery("shop", broker=redis_url, set_as_current=False),
        Celery(broker=redis_url, set_as_current=False, mongo_celery_database_url=mongo_url),
    ):
        with pytest.raises(ConfigurationError):
            Scheduler(app, lazy=True)
    names: list[Any] = ["", 1]
    for name in names:
        with pytest.raises(ConfigurationError):
            beats.make({name: {"task": "shop.count", "schedule": 60.0}})
    with pytest.raises(DeploymentError):
        beats.make(mongo_celery_database_url=standalone_url).tick()


def test_a_run_that_cannot_be_sent_delays_no_stored_run(beats: Beats, make_redis: MakeRedis) -> None:
    """Both wait after an outage, and each turn would try the broken one first."""
    server, entries = make_redis(), dict(zip(("broken", "sound"), broken_and_sound(beats), strict=True))
    beat = beats.make(entries, broker_url=server.url)
    assert leads(beat)
    server.kill()
    beats.time += MINUTE
    assert leads(beat)
    server.restart()
    beat._runs = {name: beat._runs[name] for name in entries}

    def is_sent() -> bool:
        beat._runs["broken"].retry_at = 0.0  # as after the pause of a beat with few entries
        beat.tick()
        return beats.messages(server.url) != []

    wait_for(is_sent)


def test_a_bridge_names_the_state(beats: Beats, mongo_url: str, redis_url: str) -> None:
    app = Celery("shop", broker=redis_url, set_as_current=False)
    Bridge(app, mongo_url, name="bridge", database=beats.stored.database.name)
    beat = Scheduler(app)
    assert leads(beat)
    assert beats.stored.find_one({"_id": "bridge"})
    beat.close()
