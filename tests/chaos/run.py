"""One run: world and writer, the plan step by step, and the end: all is healed, and must come to rest."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from redis.exceptions import RedisError

from tests.chaos.checks import Evidence, Judgement, judge, untrue
from tests.chaos.facts import Plan, Step
from tests.chaos.faults import KINDS, STALL, Fault, happen
from tests.chaos.person import Person
from tests.chaos.reading import Following
from tests.chaos.setting import DATA, SINK
from tests.chaos.world import World
from tests.chaos.writer import Writer
from tests.rig.history import Due, Wrote

REST_SECONDS = 90.0
"""For how long nothing may go on, once everything is healed, before what is left counts as lost."""

BROKEN_REST_SECONDS = 15.0
"""The same of a broken build: it need not come to rest."""

_REST_SECONDS_MAX = 900.0
_LOOK_SECONDS = 0.25
_CURE_SECONDS = 8.0
_HISTORY_SECONDS = 120.0
_TICK_SECONDS = 0.2
_STALL_SECONDS = 0.8
_LEADING = re.compile(r"leading bridge \S+ with term (\d+)")

Say = Callable[[str], None]


def run(plan: Plan, directory: Path, say: Say, *, broken: str = "", rest: float = REST_SECONDS) -> Judgement:
    """
    Play a plan, and judge what happened.

    Args:
        directory: for logs and whatever is evidence; it is left to the caller.
        say: takes a line about what happens.
        broken: the build that the processes are to be.
        rest: seconds without progress after which a run that was healed is given up.
    """
    added = {"CHAOS_BROKEN": broken} if broken else {}
    with World(directory, plan.members, added) as world, Machine() as machine:
        world.client[DATA].create_collection(SINK)  # else a transaction would have to create it
        following = Following(world.replica_set.url)
        playing = _Playing(plan, world, Writer(world.replica_set.url, plan.seed, following.backlog), following, say)
        world.start()
        playing.play()
        playing.come_to_rest(rest)
        evidence = playing.evidence(machine)
    judgement = judge(evidence)
    _keep(directory, plan, evidence)
    return judgement


class _Playing:
    def __init__(self, plan: Plan, world: World, writer: Writer, following: Following, say: Say) -> None:
        self._plan = plan
        self._world = world
        self._writer = writer
        self._following = following
        self._say = say
        self._person = Person(world, plan, writer)
        self._ended = threading.Event()
        self._pause = threading.Event()
        self._threads: list[threading.Thread] = []
        self._faults: list[Fault] = []
        self._troubles: list[str] = []
        self._status: Mapping[str, Any] = {}

    def play(self) -> None:
        """Write, and let every step happen at its time."""
        began = time.monotonic()
        self._writer.start()
        for step in self._plan.steps:
            self._pause.wait(max(began + step.at - time.monotonic(), 0.0))
            self._say(str(step))
            if step.does.startswith("poison"):
                self._writer.poison(step)
            else:
                thread = threading.Thread(target=self._do, args=(step,), name=f"chaos: {step.does}")
                self._threads.append(thread)
                thread.start()
        self._pause.wait(max(began + self._plan.seconds - time.monotonic(), 0.0))

    def come_to_rest(self, seconds: float) -> None:
        """Heal everything, and wait until all is done that was written."""
        self._ended.set()
        for thread in self._threads:
            thread.join()
        self._writer.stop()
        self._lift_limits()
        self._say("healed; waiting until everything is done")
        self._person.cure()
        began = cured = moved = time.monotonic()
        least = left = self._left()
        while left and (now := time.monotonic()) - moved < seconds and now - began < _REST_SECONDS_MAX:
            if now - cured > _CURE_SECONDS:
                self._say(f"{len(left)} changes are not done, such as {min(left)}")
                self._person.cure_again()
                cured = time.monotonic()
            self._pause.wait(_LOOK_SECONDS)
            left = self._left()
            if left < least:
                least, moved = left, time.monotonic()
        self._say("at rest" if not left else f"{len(left)} changes are not done, and nothing goes on")
        self._wait_for_status(seconds)

    def _wait_for_status(self, seconds: float) -> None:
        """The bridge's own view comes from reports, which are some seconds old."""
        until = time.monotonic() + (seconds if not self._left() else 0.0)
        self._status = self._person.status()
        while (untrue(self._status) or self._person.parked()) and time.monotonic() < until:
            self._status = self._person.status()

    def evidence(self, machine: Machine) -> Evidence:
        """What there is to judge; everything but the servers has ended then."""
        self._world.end_processes()
        history = self._following.end(_HISTORY_SECONDS)
        listeners = {name: ends for name, ends in self._world.unasked_ends.items() if name.startswith("listener")}
        announced = {
            int(version): path.name
            for path in sorted(self._world.logs.glob("*listener*"))
            for version in _LEADING.findall(path.read_text(encoding="utf-8", errors="replace"))
        }
        dues = {
            (fact.handler, fact.place): Due(fact.handler or "", fact.key, fact.n)
            for fact in history
            if isinstance(fact, Wrote)
        }
        return Evidence(
            history=history,
            acknowledged=self._writer.acknowledged,
            faults=[*self._faults, *machine.stalls],
            status=self._status,
            load=machine.load,
            announced=announced,
            ends=listeners,
            troubles=self._troubles,
            discarded={dues[letter] for letter in self._person.discarded & dues.keys()},
            parked=self._person.parked(),
            unlike=self._following.recording.wrong,
            steps=self._following.recording.steps.total(),
        )

    def _do(self, step: Step) -> None:
        try:
            if step.does not in KINDS:
                self._person.act(step)
                return
            begin = time.time()
            happen(self._world, step, self._ended)
            self._faults.append(Fault(step.does, begin, time.time()))
        except Exception as error:  # noqa: BLE001 - said in the verdict
            self._troubles.append(f"{step}: {type(error).__name__}: {error}")

    def _lift_limits(self) -> None:
        try:
            with self._world.broker() as broker:
                broker.config_set("proto-max-bulk-len", 512 << 20)
        except RedisError as error:
            self._troubles.append(f"the broker's limit could not be lifted: {error}")

    def _left(self) -> set[Due]:
        return self._following.open(self._writer.acknowledged)


def _keep(directory: Path, plan: Plan, evidence: Evidence) -> None:
    (directory / "plan.txt").write_text("\n".join(plan.lines()) + "\n", encoding="utf-8")
    with (directory / "history.jsonl").open("w", encoding="utf-8") as file:
        for fact in (*evidence.faults, *evidence.history):
            file.write(json.dumps({type(fact).__name__: asdict(fact)}, default=str) + "\n")


class Machine:
    """
    Watches the machine while it is entered: a context manager.

    Attributes:
        stalls: times in which this process did not run, like faults that nobody has planned.
        load: the largest number of processes that wanted a core, on an average of a minute; at least 1.
    """

    def __init__(self) -> None:
        self.stalls: list[Fault] = []
        self.load = 1.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="chaos-machine", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        before = time.time()
        while not self._ended.wait(_TICK_SECONDS):
            now = time.time()
            if now - before > _TICK_SECONDS + _STALL_SECONDS:
                self.stalls.append(Fault(STALL.name, before, now))
            before = now
            self.load = max(self.load, os.getloadavg()[0] / (os.cpu_count() or 1))
