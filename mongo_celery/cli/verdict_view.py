"""How a verdict looks on a terminal: one line, then each reason with the command that cures it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from mongo_celery.quantities import number
from mongo_celery.visible import visible

if TYPE_CHECKING:
    from mongo_celery.bridge.operations.verdict import BridgeVerdict

COLORS = {"healthy": "green", "degraded": "yellow", "failing": "red"}
_INDENT = (0, 0, 0, 2)


def verdict_view(verdict: BridgeVerdict, *, folded: bool = False) -> RenderableType:
    """
    The verdict on one bridge.

    A command stands on a line of its own, and is not broken, so that it can be copied; print it with `crop=False`.

    Args:
        folded: break it all the same at the terminal's edge, for a view that is drawn over itself again and again: a
            line that the terminal breaks by itself is one more than was counted, and leaves its trace each time.
    """
    return Group(*_parts(verdict, folded=folded))


def _parts(verdict: BridgeVerdict, *, folded: bool) -> Iterator[RenderableType]:
    line = Text.assemble((verdict.bridge, "bold"), " is ", (verdict.state, COLORS[verdict.state]))
    if verdict.reasons:
        line.append(f", for {number(len(verdict.reasons), 'reason', 'reasons')}:")
    yield line
    if verdict.note is not None:
        yield Padding(Text(verdict.note, "dim"), _INDENT, expand=False)
    for reason in verdict.reasons:
        yield Padding(
            Text.assemble((reason.code, COLORS[reason.severity]), f": {visible(reason.sentence)}"),
            _INDENT,
            expand=False,
        )
        if reason.command is not None and folded:
            yield Padding(Text(visible(reason.command), "bold", overflow="fold"), (0, 0, 0, 4), expand=False)
        elif reason.command is not None:
            yield Text(f"    {visible(reason.command)}", style="bold", no_wrap=True, overflow="ignore")
