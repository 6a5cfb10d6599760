"""One trace from the listener over the handler to what the handler has enqueued, through real processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.process import wait_for
from tests.rig.project import MakeProject, Project

Document = dict[str, Any]

ORDERS = 3


class Traced(Project):
    """The project, and the spans that it has written."""

    app = "tests.acceptance.traced_project"

    def spans(self, name: str) -> list[Document]:
        found = [
            json.loads(line)
            for path in Path(self.environment["TRACED_SPANS"]).iterdir()
            for line in path.read_text().splitlines(keepends=True)
            if line.endswith("\n")  # else it is not written to its end
        ]
        return sorted((span for span in found if span["name"] == name), key=lambda span: str(span["start_time"]))

    def wait_spans(self, name: str, count: int) -> list[Document]:
        """The same, when there are so many: processes write them in batches."""
        wait_for(lambda: len(self.spans(name)) >= count, message=lambda: f"{name}: {self.spans(name)}")
        found = self.spans(name)
        assert len(found) == count
        return found

    def done(self) -> dict[Any, Any]:
        """Orders that were written down, and the parent that the message named."""
        return {each["_id"]: each["traceparent"] for each in self.data["done"].find()}


@pytest.fixture
def traced(make_project: MakeProject, tmp_path: Path) -> Traced:
    spans = tmp_path / "spans"
    spans.mkdir()
    made: Traced = make_project(Traced, TRACED_SPANS=str(spans))
    return made


def ids(span: Document) -> tuple[str, str]:
    return span["context"]["trace_id"], span["context"]["span_id"]


def test_the_handler_of_each_change_and_what_it_enqueues_are_in_the_listeners_trace(traced: Traced) -> None:
    """A run of several changes: one producer, a consumer for each change, the commit, and the outbox's message."""
    traced.listener()
    traced.data["orders"].insert_many([{"_id": number} for number in range(ORDERS + 1)])
    traced.worker(concurrency=1)
    wait_for(lambda: len(traced.done()) == ORDERS + 1)
    processed = traced.wait_spans("process traced/bill", ORDERS + 1)
    runs = {span["parent_id"] for span in processed}
    wait_for(lambda: runs <= {span["context"]["span_id"] for span in traced.spans("send traced/bill")})
    sends = {span["context"]["span_id"]: span for span in traced.spans("send traced/bill")}
    commits = traced.wait_spans("commit traced/bill", len(runs))
    sent = traced.wait_spans(f"send {Traced.app}.write_down", ORDERS + 1)
    written = {span["context"]["span_id"] for span in sent}

    assert [span["kind"] for span in processed] == ["SpanKind.CONSUMER"] * (ORDERS + 1)
    assert [span["attributes"]["mongo_celery.seq"] for span in processed] == list(range(1, ORDERS + 2))
    for span in (*processed, *commits):
        producer = sends[span["parent_id"]]
        assert producer["kind"] == "SpanKind.PRODUCER"
        assert producer["context"]["trace_id"] == span["context"]["trace_id"]
    assert {span["parent_id"] for span in commits} == runs
    assert len(runs) <= ORDERS, "a message has several changes"
    for span in sent:
        assert (span["context"]["trace_id"], span["parent_id"]) in set(map(ids, processed))
    for carried in traced.done().values():
        assert f"0x{carried.split('-')[2]}" in written
    assert "_id" not in json.dumps([span["attributes"] for span in processed])


def test_with_the_instrumentation_of_celery_ours_stand_inside_and_around_its_spans(traced: Traced) -> None:
    """One producer and one consumer span a message, and still one trace."""
    traced.listener(TRACED_INSTRUMENTED="1")
    traced.worker(concurrency=1, TRACED_INSTRUMENTED="1")
    traced.data["orders"].insert_one({"_id": 1})
    wait_for(lambda: set(traced.done()) == {1})
    task = f"{Traced.app}.bill"
    names = ["send traced/bill", f"apply_async/{task}", f"run/{task}", "process traced/bill"]
    line = [traced.wait_spans(name, 1)[0] for name in names]

    assert [span["parent_id"] for span in line] == [None, *(span["context"]["span_id"] for span in line[:-1])]
    kinds = [span["kind"].removeprefix("SpanKind.") for span in line]
    assert kinds == ["INTERNAL", "PRODUCER", "CONSUMER", "INTERNAL"]
    assert {span["context"]["trace_id"] for span in line} == {line[0]["context"]["trace_id"]}
