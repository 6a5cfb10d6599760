"""What the bench makes of measurements, and what it refuses: without servers and without speed."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import bson
import pytest
from bson import ObjectId
from click.testing import CliRunner
from rich.console import Console

from mongo_celery.bench import stage
from mongo_celery.bench.aims import aims
from mongo_celery.bench.capacity import Capacity, Carried, ModeCapacity, backlog_of
from mongo_celery.bench.capacity_view import capacity_as_json, show_capacity
from mongo_celery.bench.command import bench
from mongo_celery.bench.errors import BenchError
from mongo_celery.bench.figures import Figure, figures_of, others_share
from mongo_celery.bench.handler_work import HandlerWork
from mongo_celery.bench.latency import Latency, quantile
from mongo_celery.bench.limits import CORES, LISTENER, MONGOD, PARTITIONS, WORKERS, Costs, limits, lowest
from mongo_celery.bench.memory import Memory
from mongo_celery.bench.modes import MODES
from mongo_celery.bench.payload import event_text, order_bytes
from mongo_celery.bench.plot import Plot
from mongo_celery.bench.rates import Measured
from mongo_celery.bench.report import as_json
from mongo_celery.bench.run import LATENCY_MODES, Results, run
from mongo_celery.bench.sizes import FULL, QUICK, BenchSizes
from mongo_celery.bench.stage import Stage
from mongo_celery.bench.tables import show
from mongo_celery.bench.takeover import TakeOver
from mongo_celery.bench.usage import Usage, available_mb, machine_seconds
from mongo_celery.bench.workload import Workload, content_of
from mongo_celery.bridge.listener import stream_intake

WIDTH = 80
NOWHERE = ["--mongo-url", "mongodb://127.0.0.1:1", "--redis-url", "redis://127.0.0.1:1/0"]
BRIDGE_CPU = {"mongod": 3900.0, "redis": 600.0, "worker_parent": 4600.0, "worker_children": 4400.0, "listener": 1300.0}


def figures() -> dict[str, Figure]:
    """Of all modes, with rates and costs as wide as they get."""
    chain = {"redis": 600.0, "worker_parent": 2500.0, "worker_children": 3000.0, "publisher": 1200.0}
    fast = {name: used / 50 for name, used in BRIDGE_CPU.items()}
    cpu = dict.fromkeys(MODES, BRIDGE_CPU) | {
        "raw_stream": {"reader": 27.0, "mongod": 20.0},
        "raw_chain": chain,
        "bridge_runs": fast,
        "bridge_bulk": fast,
    }
    rates = dict.fromkeys(MODES, 71.0) | {"raw_stream": 123_456.0, "raw_chain": 137.0, "bridge_bulk": 8220.0}
    return figures_of({name: [Measured(2000, rates[name] + step, cpu[name]) for step in (-1, 0, 1)] for name in MODES})


def results() -> Results:
    """A whole run."""
    latency = {name: Latency(200, 8.0, 19.0, 9.0) for name in ("watch_delay", "bridge_chain", "bridge_inline")}
    latency["bridge_chain"] = Latency(200, 15.0, 80.0, 9.0)
    return Results(
        seconds=601.0,
        figures=figures(),
        latency=latency,
        latency_under_load=dict.fromkeys(latency, Latency(400, 1234.5, 9876.5, 62.0)),
        memory=Memory(40_000, 50.0, (60.0, 61.0, 61.0, 61.0), 62.0),
        take_over=TakeOver(10.0, (11.0, 12.0), (0.4, 0.5)),
        others=0.43,
        left_out=("raw_task", "latency of watch_delay"),
        rough=True,
    )


def capacity() -> Capacity:
    """Of two modes, with names as long as they get."""
    carried = tuple(
        Carried(
            workers=count, rate=40.0 * count, measured=count < 16, limit=CORES, apart=12_345.0, apart_limit=LISTENER
        )
        for count in (1, 4, 16)
    )
    parts = {PARTITIONS: 12_345.0, LISTENER: 12_345.0, MONGOD: 0.5, CORES: 123_456.0}
    found = ModeCapacity(carried=carried, limits=parts, cpu_us=BRIDGE_CPU)
    return Capacity(
        Workload(content=content_of("4096"), work=HandlerWork(0.02, 0.005)),
        {"bridge_transactional": found, "bridge_runs": found},
        seconds=60.0,
        others=0.43,
        rough=True,
    )


def shown(show_it: Any, found: object) -> str:
    text = StringIO()
    show_it(found, Console(file=text, width=WIDTH))
    return text.getvalue()


def test_a_figure_is_the_median_of_its_rounds_and_its_ratio_to_that_of_raw_chain() -> None:
    """By rate and by processor time, where more is better in both; and one slow round changes neither."""
    measured = {
        "raw_chain": [Measured(10, rate, {"redis": 1000.0, "publisher": 3000.0}) for rate in (90.0, 100.0, 5.0)],
        "bridge_runs": [Measured(10, rate, {"redis": us}) for rate, us in ((900.0, 100.0), (1, 9e9), (1200, 50.0))],
    }
    found = figures_of(measured)
    assert found["raw_chain"].rate == 90.0
    assert [found["raw_chain"].ratio, found["raw_chain"].cpu_ratio] == [1.0, 1.0]
    assert found["bridge_runs"].ratio == 10.0
    assert found["bridge_runs"].cpu_ratio == 40.0
    alone = figures_of({"bridge_runs": measured["bridge_runs"]})["bridge_runs"]
    assert [alone.ratio, alone.cpu_ratio] == [None, None]


def test_what_other_processes_took_is_known() -> None:
    """Of all seconds of the cores, those in use that no process of the run has used."""
    used = Usage({"worker": 3.0, "redis": 1.0}, busy=9.0, total=16.0).since(Usage({"worker": 1.0}, 3.0, 6.0))
    assert used.by_process == {"worker": 2.0, "redis": 1.0}
    assert used.others == 3.0
    assert others_share({"raw_chain": [Measured(1, 1.0, {}, used.others, used.total)]}) == 0.3
    assert others_share({}) is None
    busy, total = machine_seconds()
    assert 0 < busy <= total
    assert available_mb() > 0


def test_an_aim_is_judged_by_rate_and_by_cpu() -> None:
    """One of them alone does not meet it: the judge has been seen to fail, in both."""
    judged = {each.name: each.met for each in aims(results())}
    assert judged == {
        "bridge_chain / raw_chain": False,
        "bridge_inline / raw_chain": False,
        "bridge_runs / raw_chain": False,
        "bridge_bulk / raw_chain": False,
        "listener_alone / raw_stream": False,
        "idle latency p50, bridge_chain / watch_delay": True,
        "idle latency p99, bridge_chain / watch_delay": False,
    }
    rate_alone = {
        "raw_chain": Figure(9, 100.0, 1.0, (), {"redis": 1000.0}),
        "bridge_chain": Figure(9, 70.0, 0.7, (), {"redis": 2000.0}),
    }
    assert [each.met for each in aims(Results(figures=rate_alone))] == [False]
    both = rate_alone | {"bridge_chain": Figure(9, 70.0, 0.7, (), {"redis": 1500.0})}
    assert [each.met for each in aims(Results(figures=both))] == [True]


def test_where_servers_were_given_nothing_is_judged_by_cpu() -> None:
    """Their time is missing in all figures: a ratio of the rest would flatter whoever keeps them busiest."""
    uncounted = ("mongod", "redis")
    missed = {
        "raw_chain": [Measured(9, 100.0, {"publisher": 1000.0})],
        "bridge_chain": [Measured(9, 70.0, {"listener": 1.0})],
    }
    found = Results(figures=figures_of(missed, counted=False), uncounted=uncounted, others=0.43)

    assert [each.values.keys() for each in aims(found)] == [{"rate"}]
    assert as_json(found, QUICK)["modes"]["bridge_chain"]["cpu_ratio_to_raw_chain"] is None
    text = " ".join(shown(show, found).split())
    assert "by CPU (aim" not in text
    assert "those by CPU" not in text
    assert "The processor time of mongod and redis is in no figure, since the servers were given" in text
    assert "Other processes, the given servers among them, took 43% of the cores meanwhile: trust ratios alone." in text


def test_a_listener_alone_is_not_charged_with_being_looked_at() -> None:
    """How far its stream is must be asked of mongod, which is as busy with that as with the stream."""
    alone = {
        "raw_stream": Figure(9, 100.0, None, (), {"reader": 20.0, "mongod": 10.0}),
        "listener_alone": Figure(9, 60.0, None, (), {"listener": 30.0, "mongod": 500.0}),
    }
    (aim,) = aims(Results(figures=alone))
    assert aim.values["cpu"] == pytest.approx(20 / 30)
    assert aim.met


@pytest.mark.parametrize(("show_it", "found"), [(show, results()), (show_capacity, capacity())])
def test_tables_fit_a_terminal(show_it: Any, found: object) -> None:
    """Nothing is wider than 80 columns, and nothing was cut to make it so."""
    text = shown(show_it, found)
    assert [line for line in text.splitlines() if len(line) > WIDTH] == []
    assert "\N{HORIZONTAL ELLIPSIS}" not in text


def test_people_are_told_all_of_a_run() -> None:
    """Each mode with its ratios, each process, both latencies, and what makes the figures less than they seem."""
    text = " ".join(shown(show, results()).split())
    for name in MODES:
        assert text.count(f" {name} ") >= 2, name
    assert "raw_chain 137 136 138 1.00 7,300 1.00" in text
    assert "bridge_bulk 8,220 8,219 8,221 60.0 296 24.7" in text
    assert "bridge_chain 3,900 4,600 4,400 1,300 600" in text
    assert "bridge_chain 15.0 80.0 1234.5 9876.5 62" in text
    assert "bridge_chain / raw_chain: 0.52 by rate, 0.49 by CPU (aim 0.6: missed)" in text
    assert "idle latency p50, bridge_chain / watch_delay: 1.88 (aim 2: met)" in text
    assert "Other processes took 43% of the cores meanwhile: trust ratios alone, those by CPU most." in text
    assert "Left out, since the time was over: raw_task, latency of watch_delay." in text
    assert "This is rough" in text
    assert "rough" not in shown(show, Results())


def test_a_run_is_one_json_object() -> None:
    """With the figures of the tables, and what makes them less than they seem."""
    found = json.loads(json.dumps(as_json(results(), QUICK)))
    assert found["modes"]["raw_chain"]["cpu_us_per_change"]["publisher"] == 1200
    assert found["modes"]["bridge_chain"]["cpu_ratio_to_raw_chain"] == pytest.approx(7300 / 14_800, abs=1e-4)
    assert found["latency_at_half_load_ms"]["bridge_chain"]["writes_per_second"] == 62
    assert found["aims"]["bridge_runs / raw_chain"].keys() == {"aim", "met", "by_rate", "by_cpu"}
    assert [found["rough"], found["others_share"], found["cpu_without"]] == [True, 0.43, []]


def test_people_are_told_what_a_machine_carries() -> None:
    """With 1, 4 and 16 workers, which is measured and which computed, and where the limit lies."""
    text = " ".join(shown(show_capacity, capacity()).split())
    assert text.startswith("Documents of 4.0 KiB, a handler of 20 ms (5 of CPU)")
    assert "bridge_runs 1 40 measured cores here 12,345 listener core" in text
    assert "4 160 measured cores here 12,345 listener core" in text
    assert "16 640 computed cores here 12,345 listener core" in text
    assert "bridge_runs 12,345 12,345 ? 0.5 123,456" in text
    assert "Other processes took 43%" in text
    assert "This is rough" in text
    plain = json.loads(json.dumps(capacity_as_json(capacity())))
    assert plain["payload_bytes"] == 4096
    assert [each["measured"] for each in plain["capacity"]["bridge_runs"]["workers"]] == [True, True, False]


def test_the_limit_is_the_part_that_is_full_first() -> None:
    """Workers grow with their number; partitions, listener and broker do not, and all share the cores here."""
    costs = Costs(
        cpu={"mongod": 0.004, "redis": 0.0005, "listener": 0.001, "worker_parent": 0.002, "worker_children": 0.0025},
        worker_rate=50.0,
        partition_rate=30.0,
        partitions=16,
        cores=2,
    )
    assert lowest(limits(costs, 1, here=True)) == (WORKERS, 50.0)
    assert lowest(limits(costs, 4, here=True)) == (WORKERS, 200.0)
    assert lowest(limits(costs, 4, here=False)) == (WORKERS, 200.0)
    assert lowest(limits(costs, 16, here=True)) == (CORES, 200.0)
    assert lowest(limits(costs, 16, here=False)) == (PARTITIONS, 480.0)
    found = limits(costs, 1000, here=False)
    assert (found[LISTENER], found[MONGOD]) == (1000.0, 500.0)
    unknown = limits(Costs(cpu={}, worker_rate=5.0, partition_rate=9.0, partitions=16, cores=2), 1, here=True)
    assert unknown.keys() == {WORKERS, PARTITIONS}


@pytest.mark.parametrize("size", [600, 100_000, 2_000_000, 15_000_000])
def test_a_backlog_has_room_in_an_oplog_whatever_a_document_has(size: int) -> None:
    """Of the bench's own server, 2 GB; and there is enough to count after a warm-up."""
    for name in ("bridge_chain", "bridge_bulk"):
        for workers in (1, 16):
            count = backlog_of(MODES[name], Workload(content=content_of(f"{size}")), 6.0, workers)
            assert count * size <= 1 << 30
            assert count >= 60


def test_a_payload_is_a_number_of_bytes_or_a_file(tmp_path: Path) -> None:
    """As many bytes as were said, and of a file what is in it, in Extended JSON, with a new `_id` each time."""
    assert Workload(content=content_of("33")).document_bytes == 33
    assert Workload(content=content_of("4096")).document_bytes == 4096
    file = tmp_path / "order.json"
    file.write_text(
        '{"_id": {"$oid": "65f2c1d8a7b3c4d5e6f70812"}, "total": {"$numberDecimal": "9.90"}, "n": {"a": [1]}}'
    )
    workload = Workload(content=content_of(str(file)))
    assert workload.document()["total"] == bson.Decimal128("9.90")
    assert workload.document()["_id"] != workload.document()["_id"]
    assert order_bytes() - 20 < Workload().document_bytes <= order_bytes()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "neither a number of bytes nor a file"),
        ("[1]", "has a list"),
        ("{", "not one document in JSON"),
        ('{"a": {"$oid": "no"}}', "not one document in JSON"),
        ('{"a": 99999999999999999999}', "not what MongoDB can store"),
        ('{"a": ' + "[" * 3000 + "]" * 3000 + "}", "--payload"),
    ],
)
def test_what_is_no_payload_is_said_so(tmp_path: Path, text: str | None, words: str) -> None:
    """Before anything starts, whatever the file has in it."""
    file = tmp_path / "order.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(BenchError, match=words):
        content_of(str(file))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only", "raw_chian"], "'raw_chian' is not one of"),
        (["--rounds", "0"], "0 is not in the range"),
        (["--payload", "32"], "--payload 32 is too small: a document with an _id and one field has"),
        (["--payload", "99999999"], "is too large: the bench takes documents of up to 15 MiB"),
        (["--payload", "no/such.json"], "neither a number of bytes nor a file that can be read"),
        (
            ["--payload", "99", "--only", "raw_chain"],
            "--only raw_chain carries no changes of yours; choose from bridge",
        ),
        (["--payload", "99", "--rounds", "3"], "--rounds is for the modes, not for what a machine carries"),
        (["--handler-seconds", "1", "--lease-ttl", "3"], "--lease-ttl is for the modes, not for what a machine"),
        (["--payload", "99", "--plot", "a.png"], "--plot draws the modes, not what a machine carries"),
        (["--handler-seconds", "31"], "31.0 is not in the range 0<=x<=30"),
        (["--handler-seconds", "0.1", "--handler-cpu-seconds", "0.2"], "is a part of --handler-seconds 0.1 and cannot"),
        ([], "MongoDB did not answer"),
    ],
)
def test_wrong_arguments_end_in_one_sentence(arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt mode, what does not go together, or an impossible address: no traceback, and nothing on stdout."""
    monkeypatch.setattr(stage, "_ANSWER_MILLISECONDS", 300)
    ended = CliRunner().invoke(bench, [*NOWHERE, *arguments])
    assert ended.exit_code != 0
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.stdout == ""
    assert isinstance(ended.exception, SystemExit)


def test_a_picture_without_matplotlib_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence with the cure, before any server starts."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    ended = CliRunner().invoke(bench, [*NOWHERE, "--plot", "bench.png"])
    assert ended.stderr.strip() == (
        "Error: --plot needs matplotlib, which is not installed; get it with: pip install 'mongo-celery[plot]'"
    )


def test_a_picture_of_a_run(tmp_path: Path) -> None:
    """Of everything, and of as little as there is; a file that cannot be drawn to is refused before the run."""
    pytest.importorskip("matplotlib", reason="the extra 'plot' is not installed")
    for name, found in (("all.svg", results()), ("one.svg", Results(figures={"raw_stream": figures()["raw_stream"]}))):
        Plot(tmp_path / name).draw(found)
        assert (tmp_path / name).read_text().rstrip().endswith("</svg>")
    for name, words in (("bench.doc", "no ending that says"), ("no/bench.png", "cannot be written")):
        with pytest.raises(BenchError, match=words):
            Plot(tmp_path / name)


def test_the_payload_is_about_600_bytes_and_equally_long() -> None:
    """All modes carry the same document of some 600 bytes; the event that tasks get holds it."""
    event = json.loads(event_text())
    assert 550 <= order_bytes() <= 650
    assert ObjectId.is_valid(event["fullDocument"]["_id"]["$oid"])


def test_a_quantile_is_a_value_that_occurred() -> None:
    """No value is made up between two samples, and the highest is never left behind."""
    values = [3.0, 1.0, 2.0]
    assert quantile(values, 0.5) == 2.0
    assert quantile(values, 0.99) == 3.0
    assert quantile([5.0], 0.99) == 5.0


def test_the_modes_are_those_of_the_published_figures() -> None:
    """In the order of a round: figures of different commits are compared by these names."""
    raw = ["raw_stream", "raw_task", "raw_chain", "watch_delay", "watch_loop", "listener_alone"]
    bridge = ["bridge_chain", "bridge_inline", "bridge_transactional", "bridge_runs", "bridge_bulk"]
    assert list(MODES) == [*raw, *bridge]


def test_what_is_read_ahead_is_little() -> None:
    """Of the changes that count, where a listener is as much as that ahead of the first handler."""
    for name in ("bridge_runs", "bridge_bulk"):
        assert stream_intake._READ_AHEAD / MODES[name].changes(FULL.changes) <= 0.05
        assert stream_intake._READ_AHEAD / MODES[name].changes(QUICK.changes) <= 0.17


def test_a_run_begins_nothing_for_which_there_is_no_time() -> None:
    """What it leaves out is named, and `--only` takes the bound away."""
    found = run(cast("Stage", SimpleNamespace(uncounted=())), replace(QUICK, seconds_max=0.0), lambda _: None)
    assert found.left_out[: len(MODES)] == QUICK.order
    assert set(found.left_out[len(MODES) :]) == {
        *(f"latency of {name}" for name in LATENCY_MODES),
        "memory",
        "take_over",
    }
    assert not found.figures


def test_only_restricts_what_is_measured() -> None:
    """Everything is wanted until something is chosen; a default run has five rounds, which follow each other."""
    assert BenchSizes().wants("memory")
    assert not BenchSizes(only=("raw_chain",)).wants("memory")
    assert FULL.rounds >= 5
    assert FULL.order == tuple(MODES)
    assert QUICK.order[:2] == ("raw_chain", "bridge_chain")
    assert set(QUICK.order) == set(MODES)
