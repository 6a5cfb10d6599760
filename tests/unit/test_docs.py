"""The pages keep their word: what they name exists, and their lists are complete."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import mongo_celery
from mongo_celery import errors, locking, testing
from mongo_celery.bridge.http.metrics import COUNTERS, GAUGES, LATENCIES, PREFIX
from mongo_celery.bridge.options import OPTION_NAMES
from mongo_celery.outbox.options import OutboxOptions, SharedOptions
from tests.acceptance.monitoring import PAGE as MONITORING
from tests.acceptance.monitoring import alerts
from tests.unit.test_commands import ALL
from tests.unit.test_log_events import events_in_the_code

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = [
    README,
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "ARCHITECTURE.md",
    ROOT / "tests/versions/README.md",
    *sorted((ROOT / "tests").glob("*.md")),
    *sorted(DOCS.rglob("*.md")),
    *sorted((ROOT / "examples").glob("*/README.md")),
]


@cache
def script(path: str) -> Any:
    spec = importlib.util.spec_from_file_location(Path(path).stem, DOCS / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def reference(name: str) -> str:
    """A page of the reference as the site has it, with the generated parts."""
    text: str = script("site/reference.py").generated((DOCS / f"reference/{name}.md").read_text())
    return text


def headings(text: str) -> list[str]:
    return re.findall(r"^#+ (.*)$", text, re.MULTILINE)


def rows(text: str) -> list[list[str]]:
    lines = re.findall(r"^\| (.*) \|$", text, re.MULTILINE)
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)] for line in lines]


def named(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_every_file_test_and_link_of_a_page_exists() -> None:
    """A promise names the test that proves it; a renamed test must not leave an empty promise."""
    broken = []
    for page in PAGES:
        text = page.read_text()
        for path, function in re.findall(r"`((?:tests|mongo_celery|examples)/[\w/]+\.py)(?:::(\w+))?`", text):
            if not (ROOT / path).exists() or (function and f"def {function}(" not in (ROOT / path).read_text()):
                broken.append(f"{page.relative_to(ROOT)}: {path}::{function}")
        for link, anchor in re.findall(r"\]\(([\w./-]*)(?:#([\w-]+))?\)", text):
            target = (page.parent / link) if link else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                broken.append(f"{page.relative_to(ROOT)}: {link}#{anchor}")
    assert broken == []


@cache
def anchors(page: Path) -> set[str]:
    return {re.sub(r"[^\w -]", "", each).strip().lower().replace(" ", "-") for each in headings(page.read_text())}


def test_every_page_is_listed_once_on_the_site() -> None:
    pages = {
        page.relative_to(ROOT).with_suffix("").as_posix() for page in PAGES if ROOT / "examples" not in page.parents
    }
    found: list[str] = []
    for page in sorted(pages):
        text = script("site/navigation.py").on_the_site(ROOT, page, (ROOT / f"{page}.md").read_text())
        lists = re.findall(r"^```\{toctree\}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        lines = [line for each in lists for line in each.splitlines() if line and not line.startswith(":")]
        names = [re.sub(r".*<(.*)>", r"\1", line) for line in lines]
        found += [name.removeprefix("/") if name.startswith("/") else f"{Path(page).parent / name}" for name in names]
    assert Counter(each for each in found if not each.startswith("examples/")) == Counter(pages - {"docs/index"})


def test_a_word_of_the_glossary_is_there_once_and_lives_where_it_says() -> None:
    """One word for one thing: its modules exist and have its names."""
    words = [row[0] for row in rows((DOCS / "glossary.md").read_text()) if row[0].startswith("**")]
    found = [row for row in rows((ROOT / "ARCHITECTURE.md").read_text()) if row[0].startswith("**")]
    assert len(words) == len(set(words)) > 40
    assert [row[0] for row in found] == words
    for row in found:
        modules = [each for each in named(row[1]) if each.endswith(".py")]
        source = "".join((ROOT / each).read_text() for each in modules)
        names = [each for each in named(row[1]) if not each.endswith(".py")]
        assert modules, row
        assert [each for each in names if not re.search(rf"^(class|def) {each}\b", source, re.MULTILINE)] == [], row


def test_the_list_of_log_records_is_that_of_the_code() -> None:
    """Every event with its level and its logger, in both directions."""
    listed = []
    for logger, section in re.findall(
        r"^## [^`\n]*`([^`]+)`$(.*?)(?=^##|\Z)", (DOCS / "logs.md").read_text(), re.MULTILINE | re.DOTALL
    ):
        # One that changes its level, as in "error, info", is not read from the code.
        listed += [(*found, logger) for found in re.findall(r"^\| `(\w+)` (\w+) \|", section, re.MULTILINE)]
    assert len(listed) == len(set(listed))
    assert set(listed) == events_in_the_code()


def test_the_page_of_monitoring_has_every_metric_and_every_alert() -> None:
    text = MONITORING.read_text(encoding="utf-8")
    totals = {f"{PREFIX}{name}_total" for name in COUNTERS}
    metrics = set(re.findall(r"^\| `(mongo_celery_bridge_\w+)", text, re.MULTILINE))
    assert metrics == {*(PREFIX + name for name in (*GAUGES, *LATENCIES)), *totals}
    commands = dict(re.findall(r"^\| `(MongoCelery\w+)` \| .+ \| `(celery -A shop [^`]+)` \|$", text, re.MULTILINE))
    assert commands == {each.name: each.command for each in alerts()}


def test_all_public_names_and_errors_are_in_the_reference() -> None:
    names = {*mongo_celery.__all__, *locking.__all__, *testing.__all__}
    assert names <= set(headings(reference("api")))
    assert {name for name in vars(errors) if name.endswith("Error")} <= set(headings(reference("errors")))


def test_all_options_are_in_the_reference_with_their_defaults() -> None:
    found = {named(row[0])[0]: row for row in rows(reference("settings")) if row[0].startswith("`")}
    assert {"url", *OPTION_NAMES, *SharedOptions.__annotations__} <= set(found)
    assert found["spill_after"][1:3] == ["`mongo_celery_spill_after`", "`CELERY_MONGO_CELERY_SPILL_AFTER`"]
    for field in dataclasses.fields(OutboxOptions):
        if field.name in SharedOptions.__annotations__:
            assert found[field.name][1] == f"`{field.default!r}`"
            assert found[field.name][2]


def test_all_commands_are_in_the_reference() -> None:
    expected = {path if path.startswith("mongo-celery") else f"celery -A app {path}" for path in ALL}
    assert expected == set(headings(reference("commands"))) - {"Commands"}
