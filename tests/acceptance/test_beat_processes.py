"""Real beats: whatever happens to the one that leads, each run is sent once, and none is missing."""

from __future__ import annotations

import base64
import json
import signal
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import redis

from tests.fixtures.process import ProjectProcess, wait_for
from tests.rig.project import Project

Document = dict[str, Any]


class Beats(Project):
    app = "tests.acceptance.beat_project"

    def beat(self, *arguments: str, name: str = "beat") -> ProjectProcess:
        return self.start("beat", "-s", "unused", "-l", "INFO", *arguments, name=name, awaited="beat: Starting")

    @property
    def lease(self) -> Document:
        return self.state["beat"].find_one({"_id": "beat"}) or {}

    def leader(self, beats: list[ProjectProcess], *, after: int = 0) -> ProjectProcess:
        """Wait until one of the beats leads with a term after this one."""

        def found() -> ProjectProcess | None:
            lease = self.lease
            is_new = lease.get("state") == "leading" and lease["term"] > after
            return next((each for each in beats if is_new and each.pid == lease["pid"]), None)

        return wait_for(found)

    def messages(self) -> list[tuple[str, str, Any]]:
        with redis.Redis.from_url(self.environment["PROJECT_BROKER"]) as client:
            found = [json.loads(each) for each in client.lrange("celery", 0, -1)]
        return [
            (each["headers"]["task"], each["headers"]["id"], json.loads(base64.b64decode(each["body"]))[1])
            for each in found
        ]

    def wait_for_runs(self, count: int = 3) -> None:
        before = Counter(task for task, _, _ in self.messages())
        wait_for(lambda: all(Counter(t for t, _, _ in self.messages())[each] >= before[each] + count for each in TASKS))

    def judge(self, resent: int) -> None:
        """After the end of all beats, no run is missing, and none was sent with two ids."""
        ids = {task: {id_ for name, id_, _ in self.messages() if name == task} for task in TASKS}
        stored = {each["task"]: each for each in self.state["beat"].find({"entry": {"$exists": True}})}
        for task in TASKS:  # a beat that ends within a turn may leave a stored run, which the next beat would send
            assert stored[task]["totalRunCount"] - len(ids[task]) in ((0, 1) if "run" in stored[task] else (0,))
        sent = {(kwargs["second"], id_) for task, id_, kwargs in self.messages() if task == "beat.second"}
        assert [each for each in Counter(second for second, _ in sent if second).most_common(1) if each[1] > 1] == []
        assert len(self.messages()) - sum(map(len, ids.values())) <= resent


TASKS = ("beat.often", "beat.second")


@pytest.mark.slow
def test_each_run_is_sent_once_whatever_happens_to_the_leader(make_project: Callable[[type[Beats]], Beats]) -> None:
    """Killed, frozen, ended regularly. A run is sent again, with its id, only after a kill."""
    project = make_project(Beats)
    beats = [project.beat(name=f"beat{number}") for number in range(5)]
    leader, kills = project.leader(beats), 0
    for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP):
        project.wait_for_runs()
        leader, term = project.leader(beats), project.lease["term"]
        leader.send(number)
        if number != signal.SIGSTOP:
            kills += number == signal.SIGKILL
            beats.remove(leader)
        else:
            frozen, beats = leader, [each for each in beats if each is not leader]
        leader = project.leader(beats, after=term)
        project.wait_for_runs()
        if number == signal.SIGSTOP:
            frozen.send(signal.SIGCONT)
            frozen.wait_for_output("has lost the lease")
            beats.append(frozen)
    project.wait_for_runs()
    for each in beats:
        assert each.terminate() == 0
    assert "listenerId" not in project.lease
    project.judge(resent=kills)


def test_a_beat_in_a_worker_leads(make_project: Callable[[type[Beats]], Beats]) -> None:
    """`worker -B`, whose child is killed at the end: its lease expires."""
    project = make_project(Beats)
    project.start("worker", "-B", "-c", "1", "-Q", "other", "-l", "INFO", awaited="ready")
    project.wait_for_runs(1)
