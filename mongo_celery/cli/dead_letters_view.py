"""Dead letters of a bridge on a narrow terminal, with some lines for each."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mongo_celery.quantities import moment, number, size

if TYPE_CHECKING:
    from mongo_celery.bridge.operations.dead_letter_commands import Found

_LINE = 72
_ERROR_LINES = 4


def list_lines(bridge: str, found: Found, plain: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """
    Return the lines that list dead letters.

    Args:
        plain: the dead letters in their JSON form.
    """
    from mongo_celery.bridge.operations.dead_letter_commands import short_ids

    yield f"{bridge}: {number(found.count, 'dead letter', 'dead letters')}"
    for id_, each in zip(short_ids([each["id"] for each in plain]), plain, strict=True):
        yield f"{id_}  {each['cause'].replace('_', ' ')} {moment(each['at'])}"
        yield "  " + _cut(f"{each['handler']}: {each['key']}")
        yield from (f"  {line}" for line in _wrap(each["error"]))
        again = describe_replay(each, leads=found.leads)
        if again is None and each["replays"]:
            again = f"the last replay failed ({number(each['replays'], 'start', 'starts')})"
        for line in (describe_passed(each), describe_parked(each), again):
            if line:
                yield f"  {line}"
    if found.count > len(plain):
        yield f"and {found.count - len(plain)} more. To see them, use --limit"


def describe_passed(plain: Mapping[str, Any]) -> str | None:
    """Describe the changes that it replaces, if its handler coalesces. None if it replaces none."""
    count = plain["passed"]
    return f"includes {number(count, 'earlier change', 'earlier changes')} of the same document" if count else None


def describe_parked(plain: Mapping[str, Any]) -> str | None:
    """Describe the changes that wait for its parked key, or the one that it waits for. None if there are none."""
    from mongo_celery.bridge.operations.dead_letter_commands import short_ids

    if plain["behind"] is not None:
        return f"waits for {short_ids([plain['behind']])[0]}"
    if not plain["parked"]:
        return None
    count = plain["waiting"]
    waiting = f", and {number(count, 'later change waits', 'later changes wait')}" if count else ""
    return f"the key is parked{waiting}"


def describe_replay(plain: Mapping[str, Any], *, leads: bool) -> str | None:
    """Describe the state of a dead letter's replay. None if no replay was requested."""
    state = plain["replay"]
    if state is None:
        return None
    said = {
        "requested": "a replay is requested" + ("" if leads else ", and begins when a listener leads"),
        "running": "a replay is running",
        "waiting": "a replay waits for its next attempt",
    }[state]
    return _cut(f"{said}: {plain['replay_error']}" if plain["replay_error"] else said)


def show_lines(plain: Mapping[str, Any], change: Mapping[str, Any], *, leads: bool) -> Iterator[str]:
    """Return the lines with all details of one dead letter."""
    yield f"{plain['handler']}: {plain['key']}"
    yield f"  id: {plain['id']}"
    yield f"  {plain['cause'].replace('_', ' ')} {moment(plain['at'])}"
    tried = number(plain["attempts"], "attempt", "attempts")
    yield f"  {tried}, {number(plain['replays'], 'start', 'starts')} by replays"
    for line in (describe_passed(plain), describe_parked(plain), describe_replay(plain, leads=leads)):
        if line:
            yield f"  {line}"
    for id_ in plain["passed_over"]:
        yield f"    {id_}"
    yield f"  error: {plain['error']}"
    if plain["traceback"]:
        yield from (f"    {line}" for line in plain["traceback"].rstrip().split("\n"))
    if change["event"] is not None:
        yield f"  the change, {size(plain['bytes'])}:"
        yield from json.dumps(change["event"], indent=2, ensure_ascii=False).split("\n")
    elif change["raw"] is not None:
        yield "  the change cannot be read as a document. --json shows its bytes in base64"
    else:
        yield "  the change was too large to be stored"


def _wrap(text: str) -> list[str]:
    """Return a few lines of an error's first line. The action is at its end."""
    return textwrap.wrap(text.partition("\n")[0], _LINE, max_lines=_ERROR_LINES, placeholder="...") or [""]


def _cut(text: str) -> str:
    line = text.splitlines()[0] if text else ""
    return line if len(line) <= _LINE else line[: _LINE - 3] + "..."
