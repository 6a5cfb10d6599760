"""What a person does in a run, by the commands that users have."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from tests.chaos.plan import Plan, Step
from tests.chaos.setting import BRIDGE, STATE
from tests.chaos.world import World
from tests.chaos.writer import Writer

_CURES_ALL = "all"


class _Halted(NamedTuple):
    subscription: str
    partition: int
    head: str


class Person:
    """
    Pauses, resumes, retries and skips.

    Attributes:
        said: what was done, a line each.
    """

    def __init__(self, world: World, plan: Plan, writer: Writer) -> None:
        self.said: list[str] = []
        self._world = world
        self._plan = plan
        self._writer = writer
        self._retried: set[_Halted] = set()

    def act(self, step: Step) -> None:
        """Do what a step of the plan says."""
        match step.does.partition(": ")[2]:
            case "pause" | "resume" as command:
                self._command(command, step.where, "--partition", str(step.partition))
            case "burst":
                self._writer.burst(step.where)
            case "cure and retry":
                for poison in self._plan.steps:
                    if poison.key and (poison.where, poison.partition) == (step.where, step.partition):
                        (self._world.gates / poison.key).touch()
                self._command("retry", step.where, "--partition", str(step.partition))

    def cure(self) -> None:
        """Let nothing stand that can go on."""
        (self._world.gates / _CURES_ALL).touch()
        self._retried = set(self._halted())
        self._command("resume")
        self._command("retry")

    def cure_again(self) -> None:
        """Retry what stands for the first time; skip what does not go on after that."""
        for each in self._halted():
            if each in self._retried:
                self._command("skip", each.subscription, "--partition", str(each.partition), "--yes")
            self._retried.add(each)
        self._command("retry")

    def status(self) -> Mapping[str, Any]:
        """What `changes status` says; empty where it says nothing that can be read."""
        process = self._world.command("status", "--json")
        process.wait()
        lines = [line for line in process.text.splitlines() if line.startswith("{")]
        found: Mapping[str, Any] = json.loads(lines[-1]) if lines else {}
        return found

    def _halted(self) -> Iterator[_Halted]:
        for document in self._world.client[STATE]["partitions"].find({"state": "halted"}):
            bridge, subscription, _, index = document["_id"].split("/")
            if bridge == BRIDGE:
                token: dict[str, Any] = document["head"]["resumeToken"]
                yield _Halted(subscription, int(index), token["_data"])

    def _command(self, *arguments: str) -> None:
        process = self._world.command(*arguments)
        status = process.wait()
        self.said.append(f"changes {' '.join(arguments)}: {status}")
