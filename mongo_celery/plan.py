"""A planned change of state, to show, confirm, run and report in a terminal, a page or Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """
    The effect of a plan after its run.

    Attributes:
        lines: the effect, as text.
        fields: the same as plain values, for JSON.
        refused: a sentence for each refused part.
    """

    lines: Sequence[str] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)
    refused: Sequence[str] = ()

    def __str__(self) -> str:
        return "\n".join((*self.refused, *self.lines))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """
    A planned change of state. Nothing changes before `run()`.

    Example:
        plan = bridge.operations.pause("orders", reason="migration")
        print(plan)
        plan.run()

    Attributes:
        command: the command as typed, without its options.
        lines: the effect, as text.
        fields: the same as plain values, for JSON.
        question: the question to confirm before the run, or None. `run()` does not ask.
        contents: documents and messages that the plan affects. Not every user may see them.
        refused: a sentence for each impossible part.
        seen: identifies the state that was read. Plans with different values are different plans.
        act: makes the change. None if there is nothing to do.
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
        question = () if self.question is None else (f"To be confirmed: {self.question}",)
        return "\n".join((*self.refused, *self.lines, *question))

    def run(self) -> PlanResult:
        """
        Make the change, and store its audit record if the command has one.

        You can repeat it after any error. If there is nothing to do, it returns the plan's content.

        Raises:
            CommandRefusedError: the state has changed since it was read. Nothing was changed.
            ServerUnavailableError: MongoDB did not answer.
            DeploymentError: a right is missing, or the audit record could not be stored.
        """
        if self.act is None:
            return PlanResult(lines=self.lines, fields=self.fields, refused=self.refused)
        return self.act()

    def plain(self, result: PlanResult | None = None) -> dict[str, Any]:
        """Return the plan as JSON, with its question or, after a run, with its result."""
        shown = {"command": self.command, "dry_run": result is None, **self.fields}
        if result is None:
            return {**shown, "question": self.question, "refused": [*self.refused]}
        return {**shown, **result.fields, "refused": [*result.refused]}
