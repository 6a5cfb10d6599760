"""
The documentation is true: its code runs on real servers, and its commands exist.

Each page's Python runs as it is written, in a process of its own; what the page calls the reader's comes from
`tests/acceptance/documentation`, which also judges what the code has done.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from celery.bin.celery import celery as celery_command
from pymongo import MongoClient

from mongo_celery.bridge.listener.in_worker import HTTP_OPTION, LISTENER_OPTION
from mongo_celery.cli.tools import main as tools_command
from tests.acceptance.documentation.pages import PAGE_MODULE, PAGES, ROOT, addressed, blocks, commands, name_of
from tests.fixtures.mongo import MakeReplicaSet
from tests.fixtures.process import Processes, wait_for
from tests.fixtures.redis import MakeRedis

README = ROOT / "README.md"
WALKED = tuple(ROOT / "docs" / each for each in ("operations/drill.md", "operations/pains.md", "tutorial.md"))
# Whose code is files: see below, test_testing_page.py and test_django_page.py.
PROJECTS = (README, ROOT / "docs/testing.md", ROOT / "docs/django.md")
WITH_CODE = [page for page in PAGES if page not in (*PROJECTS, *WALKED) and blocks(page, "python")]
DATABASES = {"shop", "bank", "mongo_celery"}
_PAGE_SECONDS_MAX = 120.0
_WORKER_OPTIONS = ("-c", "1", "--without-gossip", "--without-mingle", "--without-heartbeat")


@pytest.fixture
def urls(mongo_client: MongoClient[Any], mongo_url: str, redis_url: str) -> Iterator[tuple[str, str]]:
    _drop_databases(mongo_client)
    yield mongo_url, redis_url
    _drop_databases(mongo_client)


@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
def test_the_code_of_a_page_does_what_the_page_says(page: Path, urls: tuple[str, str], processes: Processes) -> None:
    """Every block, in order and in one namespace; a page with code that nobody prepared fails here."""
    program = "tests.acceptance.documentation.pages"
    done = processes.python(page.stem, "-W", f"error:::{PAGE_MODULE}", "-m", program, name_of(page), *urls)

    assert done.wait(_PAGE_SECONDS_MAX) == 0, done.text


def test_the_code_of_the_readme_is_a_project_that_runs(
    make_replica_set: MakeReplicaSet, make_redis: MakeRedis, processes: Processes, tmp_path: Path
) -> None:
    """Its files as written, and its two commands: an order that is written has its summary (P1)."""
    urls = make_replica_set().url, make_redis().url
    (code,) = blocks(README, "python")
    started = [line.strip() for line in commands(README) if line.startswith("celery -A shop ")]
    project = tmp_path / "project"
    (project / "shop").mkdir(parents=True)
    (project / "shop/__init__.py").write_text("from shop.celery import app, bridge\n")
    (project / "shop/summaries.py").write_text("def summary_of(order):\n    return {'total': sum(order['lines'])}\n")
    parts = re.split(r"^# (shop/\w+\.py)\n", addressed(code.code, *urls), flags=re.MULTILINE)
    for path, text in zip(parts[1::2], parts[2::2], strict=True):
        (project / path).write_text(text)
    for line in started:
        role = line.split()[-1]
        options = _WORKER_OPTIONS if role == "worker" else ()
        processes.python(role, "-m", *shlex.split(line), *options, directory=project)

    with MongoClient[dict[str, Any]](urls[0]) as client:

        def found() -> Any:
            assert all(each.running for each in processes.started)
            return client.shop.order_summaries.find_one()

        client.shop.orders.insert_one({"_id": 1, "lines": [2, 3]})
        summary = wait_for(found, _PAGE_SECONDS_MAX, "the order has its summary")

    assert [each.name for each in processes.started] == ["listener", "worker"]
    assert (summary["_id"], summary["total"]) == (1, 5)


@pytest.mark.parametrize("page", [page for page in PAGES if any(commands(page))], ids=name_of)
def test_the_commands_of_a_page_exist(page: Path) -> None:
    """Commands, their sub-commands and their options; `a | b` names siblings, capitals are the reader's."""
    for line in commands(page):
        for words in _alternatives(line):
            _check(words)


def test_the_check_of_commands_finds_what_is_wrong() -> None:
    """A check that takes everything would prove nothing."""
    for line in ("celery -A shop changes stat", "celery -A shop chances", "mongo-celery demos"):
        with pytest.raises(AssertionError):
            _check(_words(line))
    with pytest.raises(AssertionError, match="--jason"):
        _check(_words("celery -A shop changes status --jason"))


def _drop_databases(client: MongoClient[Any]) -> None:
    for name in DATABASES & set(client.list_database_names()):
        client.drop_database(name)


def _alternatives(line: str) -> Iterator[list[str]]:
    """`x a B | c [D]` is `x a B` and `x c [D]`."""
    first, *others = [_words(part) for part in line.split(" | ")]
    yield first
    named = [index for index, word in enumerate(first) if re.fullmatch(r"[a-z][\w-]*", word)]
    for other in others:
        yield [*first[: named[-1]], *other]


def _words(line: str) -> list[str]:
    return shlex.split(re.sub(r"\[(-[^\]]*)\]", r"\1", line))


def _check(words: list[str]) -> None:
    program = Path(words[0]).name
    if program not in {"celery", "mongo-celery"}:
        return
    command: click.Command = celery_command if program == "celery" else tools_command
    context = click.Context(command)
    for word in words[1:]:
        if word.startswith("-"):
            # Each command line that Celery takes in this process adds the options of its app to the worker's once more.
            taken = [*command.params, *filter(None, [command.get_help_option(context)]), LISTENER_OPTION, HTTP_OPTION]
            known = {option for each in taken for option in (*each.opts, *each.secondary_opts)}
            assert word.partition("=")[0] in known, f"{' '.join(words)}: {word}"
        elif isinstance(command, click.Group) and re.fullmatch(r"[a-z][\w-]*", word) and word != "shop":
            found = command.get_command(context, word)
            assert found is not None, f"{' '.join(words)}: {word}"
            command = found
