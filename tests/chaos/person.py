"""What a person does in a run, by the commands that users have."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from tests.chaos.facts import Plan, Step
from tests.chaos.setting import FLOWS, STATE
from tests.chaos.world import World
from tests.chaos.writer import Writer

_CURES_ALL = "all"


class _Halted(NamedTuple):
    subscription: str
    partition: int
    head: str


class Person:
    """
    Pauses, resumes, retries and skips; replays and discards letters of parked keys.

    Attributes:
        discarded: the letters that were to be discarded: subscriptions and places.
    """

    def __init__(self, world: World, plan: Plan, writer: Writer) -> None:
        self.discarded: set[tuple[str, str]] = set()
        self._world = world
        self._plan = plan
        self._writer = writer
        self._retried: set[_Halted] = set()

    def act(self, step: Step) -> None:
        match step.does.partition(": ")[2]:
            case "pause" | "resume" as command:
                self._world.command(command, step.where, str(step.partition))
            case "burst":
                self._writer.burst(step.where)
            case "replay letters":
                self._replay()
            case "discard a letter":
                self._discard(step)
            case "cure and retry":
                for poison in self._plan.steps:
                    if poison.key and (poison.where, poison.partition) == (step.where, step.partition):
                        (self._world.gates / poison.key).touch()
                self._world.command("retry", step.where, str(step.partition))

    def cure(self) -> None:
        """Let nothing stand that can go on."""
        (self._world.gates / _CURES_ALL).touch()
        self._retried = set(self._halted())
        self._world.command("resume", "--yes")
        self._world.command("retry", "--yes")
        self._replay()

    def cure_again(self) -> None:
        """Retry what stands for the first time; skip what does not go on after that."""
        for each in self._halted():
            if each in self._retried:
                self._world.command("skip", each.subscription, str(each.partition), "--yes")
            self._retried.add(each)
        self._world.command("retry", "--yes")
        self._replay()

    def status(self) -> Mapping[str, Any]:
        """What `changes status` says; empty where it says nothing that can be read."""
        said = self._world.command("status", "--json").text
        lines = [line for line in said.splitlines() if line.startswith("{")]
        found: Mapping[str, Any] = json.loads(lines[-1]) if lines else {}
        return found

    def parked(self) -> list[str]:
        found = self._world.client[STATE]["partitions"].find({"parkedKeys.0": {"$exists": True}}, {"_id": 1})
        return [each["_id"] for each in found]

    def _replay(self) -> None:
        for flow in FLOWS.values():
            if flow.parks and self._letters(flow.name):
                self._world.command("dead-letters", "replay", flow.name, "--yes")

    def _discard(self, step: Step) -> None:
        letters = self._letters(step.where)
        if letters:
            place = letters[int(step.choice * len(letters))]
            self.discarded.add((step.where, place))
            self._world.command("dead-letters", "discard", step.where, "--id", place, "--yes")

    def _letters(self, flow: str) -> list[str]:
        found = self._world.client[STATE]["dead_letters"].find({"handler": flow, "parked": {"$exists": True}})
        return sorted(str(each["resumeToken"]["_data"]) for each in found)

    def _halted(self) -> Iterator[_Halted]:
        for document in self._world.client[STATE]["partitions"].find({"state": "halted"}):
            token: dict[str, Any] = document["halted"]["resumeToken"]
            yield _Halted(document["handler"], document["partition"], token["_data"])
