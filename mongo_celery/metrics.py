"""Prometheus metrics as tables of names, help and labels. They need the extra `metrics`."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import pymongo

from mongo_celery.app import Registry
from mongo_celery.mongo.redaction import short

if TYPE_CHECKING:
    from celery import Celery
    from prometheus_client import Metric

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ImportError("Metrics need prometheus-client. Install it: pip install 'mongo-celery[metrics]'") from error

logger = logging.getLogger("mongo_celery.metrics")

Table = Mapping[str, tuple[str, str]]
"""Help and further labels of metrics, by name."""

Sample = tuple[Any, ...]
"""A metric's name, its value, and the values of its further labels."""

_ANSWER_SECONDS = 5.0


def make_families(
    prefix: str, label: str, gauges: Table, counters: Table, histograms: Table | None = None
) -> dict[str, Any]:
    """
    Return metrics without values, by name.

    Args:
        prefix: the prefix of all names.
        label: the first label of each metric.
        gauges: help and further labels of the gauges, by name.
        counters: help and further labels of the counters.
        histograms: help and further labels of the histograms.
    """
    kinds = (GaugeMetricFamily, gauges), (CounterMetricFamily, counters), (HistogramMetricFamily, histograms or {})
    return {
        name: kind(prefix + name, text, labels=[label, *labels.split()])
        for kind, table in kinds
        for name, (text, labels) in table.items()
    }


class TableCollector(Collector):
    """
    Collects the metrics of all objects of one kind in an app. Each scrape queries MongoDB once per object.

    The metric `up` is 1 if MongoDB answered for an object. If MongoDB does not answer within a few seconds, the scrape
    omits the other MongoDB metrics of this object. It never contains stale values. Other objects are not affected.

    Args:
        app: the Celery app.
        answer_seconds: the time limit for one object.

    Attributes:
        registry: the registry of the objects.
        prefix: the prefix of all names.
        label: the label with the object's name.
        gauges: help and further labels, by name.
        counters: help and further labels, by name.
    """

    registry: ClassVar[Registry[Any]]
    prefix: ClassVar[str]
    label: ClassVar[str]
    gauges: ClassVar[Table]
    counters: ClassVar[Table]

    def __init__(self, app: Celery, *, answer_seconds: float = _ANSWER_SECONDS) -> None:
        self._app = app
        self._answer_seconds = answer_seconds

    @abstractmethod
    def read(self, thing: Any) -> Iterable[Sample]:
        """Read an object's metrics from MongoDB."""

    def count(self, _thing: Any) -> Iterable[Sample]:
        """Return the metrics of this process."""
        return ()

    def describe(self) -> list[Metric]:
        """Return the metrics without values: a registry that checks for duplicates must not connect."""
        return [*self._make_families().values()]

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics."""
        families = self._make_families()
        for thing in self.registry.of(self._app):
            try:
                name = thing.name
            except Exception as error:  # noqa: BLE001 - a URL that is none, say; without a name there is nothing to label
                _log_missing(repr(thing), error)
                continue
            samples = [*self.count(thing)]
            try:
                with pymongo.timeout(self._answer_seconds):
                    samples += [("up", 1), *self.read(thing)]
            except Exception as error:  # noqa: BLE001 - one that is broken does not hide the others
                _log_missing(name, error)
                samples.append(("up", 0))
            for metric, value, *labels in samples:
                families[metric].add_metric([name, *labels], value)
        yield from families.values()

    def _make_families(self) -> dict[str, Any]:
        return make_families(self.prefix, self.label, self.gauges, self.counters)


def _log_missing(name: str, error: Exception) -> None:
    logger.warning("The metrics of %s cannot be read now: %s", name, short(error), extra={"event": "metrics_missing"})
