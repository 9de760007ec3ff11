"""Which metrics a dashboard, a file of rules or a document names, so that tests can hold them against a scrape."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser
import yaml
from prometheus_client.parser import text_string_to_metric_families

_IN_PROSE = re.compile(r"\b(?:chairlift_[a-z0-9_]+|vllm:[a-z0-9_]+)\b")
_GRAFANA_VARIABLES = {"$__rate_interval": "1m", "$__range": "1h"}
_OF_TARGET = {"job", "instance"}  # labels that Prometheus adds
_OF_PROMETHEUS: dict[str, set[str]] = {"up": set(), "ALERTS": {"alertname", "alertstate"}}  # its own series


@dataclass(frozen=True, slots=True)
class Query:
    """What a PromQL expression reads."""

    selectors: frozenset[tuple[str, frozenset[str]]]
    """Each metric, with the labels that it is selected by."""
    grouping: frozenset[str]
    """Labels in `by (...)`."""


def metric_names_in(path: Path) -> set[str]:
    """The metrics that a dashboard (.json), a file of rules (.yml) or a document (any other) names."""
    if path.suffix in (".json", ".yml"):
        return {name for expr in expressions_in(path) for name, _ in parse_query(expr).selectors}
    return set(_IN_PROSE.findall(path.read_text(encoding="utf-8")))


def names_in(scrape: bytes) -> set[str]:
    """The metrics that a scrape (Prometheus' text format) has; a histogram also by its name without `_bucket`."""
    families = text_string_to_metric_families(scrape.decode())
    histograms = {family.name for family in families if family.type == "histogram"}
    return set(labels_in(scrape)) | histograms


def labels_in(scrape: bytes) -> dict[str, set[str]]:
    """The labels of every series in a scrape, by the name that a query selects it with."""
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(scrape.decode()):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    return labels


def expressions_in(path: Path) -> list[str]:
    """Every PromQL expression in a dashboard or a file of rules."""
    text = path.read_text(encoding="utf-8")
    found = list(_values_of("expr", json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)))
    for variable, value in _GRAFANA_VARIABLES.items():
        found = [expr.replace(variable, value) for expr in found]
    return found


def parse_query(expr: str) -> Query:
    """Parse an expression. Raises ValueError when it is no PromQL."""
    selectors: set[tuple[str, frozenset[str]]] = set()
    grouping: set[str] = set()

    def visit(node: promql_parser.Expr) -> bool:
        if isinstance(node, promql_parser.VectorSelector) and node.name is not None:
            selectors.add((node.name, frozenset(matcher.name for matcher in node.matchers.matchers)))
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            grouping.update(node.modifier.labels)
        return True

    promql_parser.walk(promql_parser.parse(expr), visit)
    return Query(frozenset(selectors), frozenset(grouping))


def missing_from(scrape: bytes, expr: str) -> list[str]:
    """What an expression asks for and a scrape does not have: metrics, labels of a metric, labels to group by."""
    there = labels_in(scrape) | _OF_PROMETHEUS
    query = parse_query(expr)
    missing = [name for name, _ in query.selectors if name not in there]
    known = {name: there.get(name, set()) | _OF_TARGET for name, _ in query.selectors}
    missing += [f"{name}{{{label}}}" for name, labels in query.selectors for label in labels - known[name]]
    missing += [f"by ({label})" for label in query.grouping - set().union(*known.values())]
    return missing


def _values_of(key: str, tree: Any) -> Iterator[str]:
    if isinstance(tree, dict):
        for name, value in tree.items():
            if name == key:
                yield value
            else:
                yield from _values_of(key, value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _values_of(key, value)
