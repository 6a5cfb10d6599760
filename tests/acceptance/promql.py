"""
As much of Prometheus's query language as the project's dashboard and alerts use, evaluated on real scrapes.

What it does not know, it refuses: a metric that is in no scrape, a label or a value that it never has, a rate of what
is no counter. `test_monitoring.py` has Prometheus itself evaluate the same expressions, where it is installed.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from prometheus_client.parser import text_string_to_metric_families

Labels = frozenset[tuple[str, str]]
Vector = dict[Labels, float]
Value = float | Vector

_TOKEN = re.compile(
    r'\s*(?:(?P<string>"[^"]*")|(?P<range>\[\d+[smh]\])|(?P<number>\d+(?:\.\d+)?)|(?P<name>[a-zA-Z_:][\w:]*)'
    r"|(?P<mark>==|!=|>=|<=|=~|!~|[><=(){},+\-*/]))"
)
_COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
}
_ARITHMETIC: Mapping[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": lambda one, other: one / other if other else math.nan,
}
_AGGREGATES: Mapping[str, Callable[[Sequence[float]], float]] = {"sum": sum, "max": max, "min": min}


class RefusedError(Exception):
    """An expression that asks for what no scrape has, or that this does not know."""


@dataclass
class Scrapes:
    """What was scraped, one after the other, as Prometheus would have it of one target."""

    at: list[float] = field(default_factory=list)
    samples: list[dict[str, Vector]] = field(default_factory=list)
    counters: set[str] = field(default_factory=set)

    def add(self, text: str, at: float) -> None:
        """Take in what `/metrics` has said."""
        found: dict[str, Vector] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = {**sample.labels, "instance": "one", "job": "listener"}
                found.setdefault(sample.name, {})[frozenset(labels.items())] = sample.value
                if family.type in {"counter", "histogram"}:
                    self.counters.add(sample.name)
        self.at.append(at)
        self.samples.append(found)

    def evaluate(self, expression: str) -> Value:
        """The value of an expression at the last scrape; a range reaches back to the first one."""
        parsed = _Expression(self, expression)
        value = parsed.comparison()
        if parsed.token is not None:
            raise RefusedError(f"{parsed.token!r} is left of {expression}")
        return value

    def names(self) -> set[str]:
        """All names that were ever scraped."""
        return {name for samples in self.samples for name in samples}

    def known(self, name: str) -> list[dict[str, str]]:
        """All labels that a metric has ever had."""
        return [dict(labels) for samples in self.samples for labels in samples.get(name, {})]


class _Expression:
    def __init__(self, scrapes: Scrapes, text: str) -> None:
        self._scrapes = scrapes
        self._tokens = self._read(text)
        self.token = next(self._tokens, None)

    @staticmethod
    def _read(text: str) -> Iterator[str]:
        place = 0
        while text[place:].strip():
            found = _TOKEN.match(text, place)
            if found is None:
                raise RefusedError(f"{text[place:]!r} in {text}")
            place = found.end()
            yield found.group(0).strip()

    def _take(self, wanted: str | None = None) -> str:
        taken = self.token
        if taken is None or (wanted is not None and taken != wanted):
            raise RefusedError(f"{wanted} was expected, not {taken}")
        self.token = next(self._tokens, None)
        return taken

    def comparison(self) -> Value:
        value = self._sum()
        while self.token in _COMPARE:
            holds = _COMPARE[self._take()]
            other = self._sum()
            assert isinstance(value, dict), "vectors are compared"
            assert isinstance(other, float), "with numbers"
            value = {labels: each for labels, each in value.items() if holds(each, other)}
        return value

    def _sum(self) -> Value:
        value = self._product()
        while self.token in {"+", "-"}:
            value = _combined(_ARITHMETIC[self._take()], value, self._product())
        return value

    def _product(self) -> Value:
        value = self._single()
        while self.token in {"*", "/"}:
            value = _combined(_ARITHMETIC[self._take()], value, self._single())
        return value

    def _single(self) -> Value:
        token = self._take()
        if token == "(":
            value = self.comparison()
            self._take(")")
            return value
        if token[0].isdigit():
            return float(token)
        if token in _AGGREGATES:
            return self._aggregate(_AGGREGATES[token])
        if self.token == "(":
            self._take("(")
            value = self._call(token)
            self._take(")")
            return value
        if token in self._scrapes.counters:
            raise RefusedError(f"{token} is a counter: ask for its rate")
        return self._selected(token, self._scrapes.samples[-1])

    def _call(self, name: str) -> Vector:
        if name in {"rate", "increase"}:
            return self._grown(self._take(), per_second=name == "rate")
        if name == "absent":
            return {} if self._selected(self._take(), self._scrapes.samples[-1]) else {frozenset(): 1.0}
        if name != "histogram_quantile":
            raise RefusedError(f"{name} is not known here")
        share = self._single()
        self._take(",")
        value = self.comparison()
        assert isinstance(share, float), "a share"
        assert isinstance(value, dict), "of buckets"
        return _quantile(share, value)

    def _aggregate(self, combine: Callable[[Sequence[float]], float]) -> Vector:
        self._take("by")
        self._take("(")
        kept = set()
        while self.token != ")":
            kept.add(self._take())
            if self.token == ",":
                self._take(",")
        self._take(")")
        value = self._single()
        assert isinstance(value, dict), "vectors are aggregated"
        groups: dict[Labels, list[float]] = {}
        for labels, each in value.items():
            groups.setdefault(frozenset(pair for pair in labels if pair[0] in kept), []).append(each)
            if not kept <= {name for name, _ in labels}:
                raise RefusedError(f"{sorted(kept)} are not all among the labels {sorted(dict(labels))}")
        return {labels: combine(values) for labels, values in groups.items()}

    def _matchers(self, name: str) -> Callable[[Mapping[str, str]], bool]:
        known = self._scrapes.known(name)
        if not known:
            raise RefusedError(f"no scrape has {name}")
        tests: list[Callable[[Mapping[str, str]], bool]] = []
        if self.token == "{":
            self._take("{")
            while self.token != "}":
                label, mark, wanted = self._take(), self._take(), self._take().strip('"')
                if not all(label in each for each in known):
                    raise RefusedError(f"{name} has no label {label}")
                if mark in {"=", "!="} and wanted not in {each[label] for each in known}:
                    raise RefusedError(f"{label} of {name} is never {wanted!r}")
                tests.append(_matcher(label, mark, wanted))
                if self.token == ",":
                    self._take(",")
            self._take("}")
        return lambda labels: all(test(labels) for test in tests)

    def _selected(self, name: str, samples: Mapping[str, Vector]) -> Vector:
        matches = self._matchers(name)
        return {labels: value for labels, value in samples.get(name, {}).items() if matches(dict(labels))}

    def _grown(self, name: str, *, per_second: bool) -> Vector:
        if name not in self._scrapes.counters:
            raise RefusedError(f"{name} is no counter: it has no rate")
        matches = self._matchers(name)
        if self.token is None or not self.token.startswith("["):
            raise RefusedError(f"a rate of {name} needs a range")
        self._take()
        grown: Vector = {}
        for before, after in pairwise(self._scrapes.samples):
            for labels, value in after.get(name, {}).items():
                if matches(dict(labels)) and labels in before.get(name, {}):
                    first = before[name][labels]
                    if value < first:
                        raise RefusedError(f"{name} has gone back from {first} to {value}")
                    grown[labels] = grown.get(labels, 0.0) + value - first
        seconds = self._scrapes.at[-1] - self._scrapes.at[0]
        return {labels: value / seconds if per_second else value for labels, value in grown.items()}


def _matcher(label: str, mark: str, wanted: str) -> Callable[[Mapping[str, str]], bool]:
    if mark in {"=", "!="}:
        return lambda labels: (labels[label] == wanted) is (mark == "=")
    return lambda labels: (re.fullmatch(wanted, labels[label]) is not None) is (mark == "=~")


def _combined(combine: Callable[[float, float], float], one: Value, other: Value) -> Value:
    if isinstance(one, float) or isinstance(other, float):
        raise RefusedError("only vectors are combined here")
    return {labels: combine(value, other[labels]) for labels, value in one.items() if labels in other}


def _quantile(share: float, buckets: Vector) -> Vector:
    """The end of the bucket in which it lies: near enough to see whether there is one."""
    ends: dict[Labels, list[tuple[float, float]]] = {}
    for labels, count in buckets.items():
        end = float(dict(labels)["le"])
        ends.setdefault(frozenset(pair for pair in labels if pair[0] != "le"), []).append((end, count))
    found: Vector = {}
    for labels, each in ends.items():
        each.sort()
        total = each[-1][1]
        if each[-1][0] != math.inf or any(one[1] > other[1] for one, other in pairwise(each)):
            raise RefusedError(f"these are no buckets: {each}")
        found[labels] = next((end for end, count in each if count >= share * total), math.nan) if total else math.nan
    return found
