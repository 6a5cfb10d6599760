"""The page and the metrics of snapshots, without a browser and without Prometheus."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mongo_celery.bridge.http.metrics import expose
from mongo_celery.bridge.http.page import render_page
from mongo_celery.bridge.listener.activity import Activity
from mongo_celery.bridge.operations.bridge_snapshot import BridgeSnapshot, unreadable
from mongo_celery.bridge.operations.judgement import judge
from mongo_celery.bridge.operations.snapshot_reader import shape
from mongo_celery.findings import degraded, failing
from tests.unit.test_status import facts, image

HEALTHY = judge(shape(facts()))
HALTED = judge(shape(facts(images=[image(0), image(1, state="halted", error="ValueError: no", retry={})])))
MARKUP = "<b>'{names}' & \"x\"</b>"


def metrics_of(shown: BridgeSnapshot) -> dict[tuple[str, ...], float]:
    activity = Activity(shown.bridge, ["summarise"], 15.0)
    text = expose([activity], lambda: [shown], list).decode()
    return {
        (
            sample.name.removeprefix("mongo_celery_bridge_"),
            *(sample.labels[name] for name in sample.labels if name != "bridge"),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def page_of(shown: BridgeSnapshot, host: str = "one") -> str:
    return render_page([shown], host, 42)


def test_a_value_is_escaped_wherever_it_is() -> None:
    """It is neither markup nor a field of the template."""
    finding = failing(MARKUP, f"{MARKUP} `{MARKUP}`", MARKUP)
    text = page_of(replace(HEALTHY, bridge=MARKUP, findings=(finding,)), host=MARKUP)
    assert "<b>'" not in text
    assert "&lt;b&gt;&#x27;{names}&#x27; &amp; &quot;x&quot;&lt;/b&gt;" in text


def test_all_commands_of_a_finding_can_be_copied_and_no_other_text() -> None:
    """What stands between backticks in a sentence may be foreign."""
    finding = degraded("paused", "ValueError: `celery -A shop changes remove bill`", "celery a", "celery b")
    text = page_of(replace(HEALTHY, findings=(finding,)))
    assert re.findall(r'<code dir="ltr">([^<]+)</code><button', text) == ["celery a", "celery b"]


@pytest.mark.parametrize("shown", [HEALTHY, HALTED, unreadable("shop", "MongoDB gave no answer.")])
def test_the_verdict_of_page_and_metrics_is_that_of_the_snapshot(shown: BridgeSnapshot) -> None:
    """P16: the metrics of state are missing where MongoDB cannot be read."""
    assert f"<title>{shown.verdict}: shop</title>" in page_of(shown)
    metrics = metrics_of(shown)
    assert metrics["verdict",] == shown.exit_code
    failing_codes = {labels[0] for (name, *labels), value in metrics.items() if name == "finding" and value == 2}
    assert failing_codes == {each.code for each in shown.findings if each.severity == "failing"}
    assert metrics["up",] == (("lag_seconds", "summarise") in metrics) == shown.is_readable
