"""A change of state before it is made: to be shown, asked for, made and reported, in a terminal, a page or Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """
    The effect of a plan that was run.

    Attributes:
        lines: the effect, for people.
        fields: the same as plain values, for JSON.
        refused: a sentence for each part that was not done.
    """

    lines: Sequence[str] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)
    refused: Sequence[str] = ()

    def __str__(self) -> str:
        return "\n".join((*self.refused, *self.lines))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """
    A change of state, as it would be made now. Nothing is changed before `run()`.

    Example:
        plan = bridge.operations.pause("orders", reason="migration")
        print(plan)
        plan.run()

    Attributes:
        command: the command as it is typed, without its options.
        lines: what would happen, for people.
        fields: the same as plain values, for JSON.
        question: to be asked before it is run; None where nobody has to be asked.
        contents: documents and messages that it is about. Not everybody may see them.
        refused: a sentence for each part that cannot be done.
        seen: names what was read. A second plan with another value is about something else.
        act: makes the change; None where there is nothing to do.
    """

    command: str
    lines: Sequence[str]
    act: Callable[[], PlanResult] | None
    fields: Mapping[str, Any] = field(default_factory=dict)
    question: str | None = None
    contents: Sequence[str] = ()
    refused: Sequence[str] = ()
    seen: str = ""

    def __str__(self) -> str:
        return "\n".join((*self.refused, *self.lines))

    def run(self) -> PlanResult:
        """
        Make the change, and store its audit record where the command has one.

        It can be repeated after any error. If there is nothing to do, it returns what the plan says.

        Raises:
            CommandRefusedError: what was read has changed meanwhile. Nothing was changed.
            ServerUnavailableError: MongoDB did not answer.
            DeploymentError: a right is missing, or the audit record could not be stored.
        """
        if self.act is None:
            return PlanResult(lines=self.lines, fields=self.fields, refused=self.refused)
        return self.act()

    def plain(self, result: PlanResult | None = None) -> dict[str, Any]:
        """Return the plan as JSON has it; of one that was run with its result."""
        done = {} if result is None else result.fields
        refused = self.refused if result is None else result.refused
        return {"command": self.command, "dry_run": result is None, **self.fields, **done, "refused": [*refused]}
