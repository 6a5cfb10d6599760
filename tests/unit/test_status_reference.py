"""docs/reference/status.md is made from the types of a snapshot: `python -m tests.unit.test_status_reference` does."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mongo_celery import findings
from mongo_celery.bridge.operations import bridge_snapshot
from mongo_celery.bridge.operations.bridge_snapshot import BridgeSnapshot

PAGE = Path(__file__).parents[2] / "docs/reference/status.md"
NAMES = {**vars(bridge_snapshot), **vars(findings)}


def types() -> list[type]:
    found: list[type] = [BridgeSnapshot]
    for each in found:
        for field in dataclasses.fields(each):
            for name in re.findall(r"\w+", str(field.type)):
                kind = NAMES.get(name)
                if dataclasses.is_dataclass(kind) and isinstance(kind, type) and kind not in found:
                    found.append(kind)
    return found


def texts(kind: type) -> tuple[str, dict[str, str]]:
    """What a docstring says of a type, and of each of its attributes."""
    summary, _, attributes = inspect.getdoc(kind).partition("\nAttributes:\n")  # type: ignore[union-attr]
    found = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", attributes, re.MULTILINE)
    return " ".join(summary.split()), {name: " ".join(text.split()) for name, text in found}


def as_json(field: dataclasses.Field[Any]) -> str:
    text = str(field.type).replace(" | None", "?")
    words = {"datetime": "time", "int": "number", "float": "number", "str": "text", "bool": "boolean"}
    for name, word in words.items():
        text = re.sub(rf"\b{name}\b", word, text)
    text = re.sub(r"tuple\[(.+), \.\.\.\]", r"\1[]", text)
    text = re.sub(r"Mapping\[text, (.+)\]", r"object of \1", text)
    return re.sub(r"\b([A-Z]\w+)\b", lambda met: linked(met[1]), text)


def linked(name: str) -> str:
    return f"[{name}](#{name.lower()})" if dataclasses.is_dataclass(NAMES.get(name)) else "text"


def page() -> str:
    return "\n".join(lines()) + "\n"


def lines() -> Iterator[str]:
    yield "# Status"
    yield ""
    yield "`changes status --json` and `/status` of the listener print a `BridgeSnapshot` for each bridge."
    yield "Its `verdict` is `healthy`, `degraded` or `failing`. Times are ISO 8601 in UTC. In the tables, a type with"
    yield "`?` can be null, and `[]` is a list."
    for kind in types():
        summary, attributes = texts(kind)
        yield from ("", f"## {kind.__name__}", "", summary, "", "| field | meaning |", "|---|---|")
        for field in dataclasses.fields(kind):
            meaning = attributes.get(field.name, "").replace("None", "Null").removesuffix(".")
            yield f"| `{field.name}` {as_json(field)} | {meaning} |"


def test_the_page_is_made_from_the_types() -> None:
    """Every field has its row, and each that its type's first sentence does not explain a meaning."""
    assert PAGE.read_text() == page(), "run: python -m tests.unit.test_status_reference"
    for kind in types():
        _, attributes = texts(kind)
        assert not attributes or set(attributes) <= {each.name for each in dataclasses.fields(kind)}, kind


if __name__ == "__main__":
    PAGE.write_text(page())
