"""The evaluator by which the dashboard and alerts are tried refuses what Prometheus would leave empty in silence."""

from __future__ import annotations

import re

import pytest

from mongo_celery.bridge.http.metrics import COUNTERS, GAUGES, LATENCIES, PREFIX
from tests.acceptance.monitoring import PAGE, alerts, panels
from tests.acceptance.promql import RefusedError, Scrapes

TEXT = """\
# TYPE lag gauge
lag{{handler="a"}} {lag}
lag{{handler="b"}} 1
# TYPE done_total counter
done_total{{handler="a"}} {done}
# TYPE took histogram
took_bucket{{handler="a",le="1.0"}} {done}
took_bucket{{handler="a",le="+Inf"}} {done}
took_count{{handler="a"}} {done}
took_sum{{handler="a"}} 1
"""
A, B = frozenset({("handler", "a")}), frozenset({("handler", "b")})


@pytest.fixture
def scrapes() -> Scrapes:
    """Give two scrapes, ten seconds apart."""
    made = Scrapes()
    made.add(TEXT.format(lag=3, done=0), 0.0)
    made.add(TEXT.format(lag=5, done=40), 10.0)
    return made


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("max by (handler) (lag)", {A: 5, B: 1}),
        ("max by (handler) (lag) > 3", {A: 5}),
        ('sum by (handler) (lag{handler!="a"})', {B: 1}),
        ('sum by (handler) (rate(done_total{handler=~".*"}[5m]))', {A: 4}),
        ("sum by (handler) (increase(done_total[5m])) / max by (handler) (lag)", {A: 8}),
        ("histogram_quantile(0.95, sum by (le, handler) (rate(took_bucket[5m])))", {A: 1}),
        ("absent(lag)", {}),
        ('absent(lag{handler=~"c"})', {frozenset(): 1}),
    ],
)
def test_expressions_have_their_values(scrapes: Scrapes, expression: str, value: object) -> None:
    assert scrapes.evaluate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "max by (handler) (nothing)",
        "max by (color) (lag)",
        'max by (handler) (lag{color="red"})',
        'max by (handler) (lag{handler="c"})',
        "max by (handler) (done_total)",
        "sum by (handler) (rate(lag[5m]))",
        "sum by (handler) (rate(done_total))",
        "histogram_quantile(0.5, sum by (handler) (rate(took_bucket[5m])))",
        "max by (handler) (lag) lag",
        "lag ?",
    ],
)
def test_what_no_scrape_has_is_refused(scrapes: Scrapes, expression: str) -> None:
    """A checker that has never failed has not been tested."""
    with pytest.raises((RefusedError, KeyError)):
        scrapes.evaluate(expression)


def test_a_counter_that_goes_back_is_refused(scrapes: Scrapes) -> None:
    scrapes.add(TEXT.format(lag=5, done=39), 20.0)
    with pytest.raises(RefusedError, match="gone back"):
        scrapes.evaluate("sum by (handler) (rate(done_total[5m]))")


def test_the_page_has_every_metric_and_every_alert() -> None:
    """With what it measures, what it means, and which command cures it."""
    text = PAGE.read_text(encoding="utf-8")
    metrics = set(re.findall(r"^\| `(mongo_celery_bridge_\w+)", text, re.MULTILINE))
    assert metrics == {
        *(PREFIX + name for name in (*GAUGES, *LATENCIES)),
        *(f"{PREFIX}{name}_total" for name in COUNTERS),
    }
    commands = dict(re.findall(r"^\| `(MongoCelery\w+)` \| .+ \| `(celery -A shop [^`]+)` \|$", text, re.MULTILINE))
    assert commands == {each.name: each.command for each in alerts()}
    assert len(alerts()) == len(set(commands))
    assert panels()
