"""Errors of the stream that last: a whole listener says so, asks slowly, and loses nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient

from tests.acceptance.chain_rig import Chain
from tests.fixtures.failpoint import Failpoint
from tests.fixtures.process import ProjectProcess, wait_for

Document = dict[str, Any]

REOPENING = re.compile(r"change stream interrupted \((\w+), code (\d+)\), (\d+) in a row, opened again in ([\d.]+) s")
LASTING: dict[str, Document] = {
    "ExceededTimeLimit": {"errorCode": 262, "errorLabels": ["ResumableChangeStreamError"]},
    "CursorKilled": {"errorCode": 237},
}


@pytest.fixture
def chain(mongo_client: MongoClient[Document], mongo_url: str, tmp_path: Path) -> Iterator[Chain]:
    """Give a bridge with one handler."""
    with Chain(mongo_client, mongo_url, tmp_path, handlers=["plain"]) as started:
        yield started


def _opened(client: MongoClient[Document]) -> int:
    """How many `aggregate`s the server has been sent by anybody."""
    return int(client.admin.command("serverStatus")["metrics"]["commands"]["aggregate"]["total"])


def _reopenings(listener: ProjectProcess) -> list[float]:
    return [float(each[3]) for each in REOPENING.findall(listener.text)]


@pytest.mark.parametrize("name", ["ExceededTimeLimit", pytest.param("CursorKilled", marks=pytest.mark.slow)])
def test_an_error_that_lasts_is_said_and_paced_and_loses_nothing(
    chain: Chain, mongo_client: MongoClient[Document], failpoint: Failpoint, name: str
) -> None:
    """P15: it was hundreds of openings a second without a word; now one a pause, each with a record."""
    listener, _ = chain.both()
    chain.write_many("plain", ["a", "b"], 2)
    chain.wait_done()
    before = _opened(mongo_client)
    with failpoint(failCommands=["getMore"], appName=chain.app_name("listener"), **LASTING[name]):
        chain.write_many("plain", ["c", "d"], 2)
        wait_for(lambda: len(_reopenings(listener)) >= 3)
        opened = _opened(mongo_client) - before
    pauses = _reopenings(listener)
    assert pauses[0] == 0.0
    assert all(pause >= 1.0 for pause in pauses[1:])
    assert opened <= len(_reopenings(listener)) + 1, "one opening a record, and nobody else opens any"
    assert name in {each[0] for each in REOPENING.findall(listener.text)}
    chain.wait_done()
    chain.judge()
