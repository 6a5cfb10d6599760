"""The one renderer of plans: what it asks, runs, prints and ends with."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from mongo_celery.cli.acting import acting_on
from mongo_celery.errors import CommandRefusedError
from mongo_celery.plan import Plan, PlanResult


@dataclass
class Shown:
    """A command, its options, and how often it was run."""

    plan: dict[str, Any]
    result: PlanResult | Exception
    runs: list[str] = field(default_factory=list)

    def run(self, *words: str, answer: str = "") -> Result:
        """Type it."""

        def act() -> PlanResult:
            self.runs.append("run")
            if isinstance(self.result, Exception):
                raise self.result
            return self.result

        option = click.option("--name")

        @click.command()
        @acting_on("name", option, lambda _, name: name)
        def command(name: str | None) -> Plan:
            given = {"command": "clean", "lines": [f"would clean {name}"], "act": act, "fields": {"cleaned": 0}}
            return Plan(**{**given, **self.plan})

        return CliRunner().invoke(command, ["--name", "shop", *words], input=answer)


def shown(result: PlanResult | Exception | None = None, **plan: Any) -> Shown:
    return Shown(plan, PlanResult(lines=["cleaned"], fields={"cleaned": 2}) if result is None else result)


def test_what_asks_nothing_runs_and_prints_its_result() -> None:
    command = shown()
    done = command.run()
    assert (done.exit_code, done.stdout, done.stderr, command.runs) == (0, "cleaned\n", "", ["run"])


@pytest.mark.parametrize(("answer", "code", "runs"), [("y\n", 0, ["run"]), ("n\n", 1, []), ("", 1, [])])
def test_a_question_is_asked_after_the_plan_was_shown(answer: str, code: int, runs: list[str]) -> None:
    """On standard error; nobody who answers is a no."""
    command = shown(question="Clean?")
    done = command.run(answer=answer)
    assert (done.exit_code, command.runs) == (code, runs)
    assert done.stderr.startswith("would clean shop\nClean? [y/N]")


def test_yes_asks_nothing_and_still_shows_what_may_be_the_only_trace() -> None:
    command = shown(question="Clean?", contents=["the only copy"])
    done = command.run("--yes")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "cleaned\n", "would clean shop\nthe only copy\n")


def test_a_dry_run_changes_nothing() -> None:
    command = shown(question="Clean?")
    done = command.run("--dry-run")
    assert (done.exit_code, done.stdout, command.runs) == (0, "would clean shop\n", [])
    plain = json.loads(command.run("--dry-run", "--json").stdout)
    assert plain == {"command": "clean", "dry_run": True, "cleaned": 0, "question": "Clean?", "refused": []}


def test_json_has_the_keys_of_the_plan_with_what_was_done() -> None:
    done = shown().run("--json")
    assert json.loads(done.stdout) == {"command": "clean", "dry_run": False, "cleaned": 2, "refused": []}


def test_nothing_to_do_is_no_failure() -> None:
    command = shown(act=None, lines=["Nothing to do."], question="Clean?")
    done = command.run()
    assert (done.exit_code, done.stdout, command.runs) == (0, "Nothing to do.\n", [])


@pytest.mark.parametrize("as_json", [False, True])
def test_what_is_refused_ends_with_status_1(*, as_json: bool) -> None:
    """In part or as a whole."""
    words = ["--json"] if as_json else []
    part = shown(PlanResult(lines=["cleaned 1"], refused=["2 is locked."])).run(*words)
    assert part.exit_code == 1
    if as_json:
        assert json.loads(part.stdout)["refused"] == ["2 is locked."]
    else:
        assert (part.stdout, part.stderr) == ("cleaned 1\n", "Error: 2 is locked.\n")
    whole = shown(CommandRefusedError("It has changed.")).run(*words)
    assert (whole.exit_code, whole.stdout, whole.stderr) == (1, "", "Error: It has changed.\n")
