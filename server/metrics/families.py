"""How a metric family is written: one line for each, with the labels that all of them share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from server.metrics.distribution import Distribution

Labels = Mapping[str, str]
Values = Mapping[tuple[str, ...], float]


@dataclass(frozen=True, slots=True)
class Families:
    """Makes metric families whose samples all carry `labels`."""

    labels: Labels

    def gauge(self, name: str, doc: str, value: float, **more: str) -> Metric:
        """A value that goes up and down. `more`: labels beside the shared ones."""
        labels = {**self.labels, **more}
        family = GaugeMetricFamily(name, doc, labels=tuple(labels))
        family.add_metric(tuple(labels.values()), value)
        return family

    def counter(self, name: str, doc: str, value: float) -> Metric:
        """A sum since start. It is published as `name` + `_total`."""
        return self.counters(name, doc, (), {(): value})

    def counters(self, name: str, doc: str, label_names: Sequence[str], values: Values) -> Metric:
        """Sums since start, by the values of `label_names`."""
        family = CounterMetricFamily(name, doc, labels=(*self.labels, *label_names))
        for label_values, value in values.items():
            family.add_metric((*self.labels.values(), *label_values), value)
        return family

    def histogram(self, name: str, doc: str, observed: Distribution, bounds: Sequence[float]) -> Metric:
        """A distribution, read at `bounds`."""
        return self.histograms(name, doc, (), {(): observed}, bounds)

    def histograms(
        self,
        name: str,
        doc: str,
        label_names: Sequence[str],
        observed: Mapping[tuple[str, ...], Distribution],
        bounds: Sequence[float],
    ) -> Metric:
        """Distributions by the values of `label_names`, all read at `bounds`."""
        family = HistogramMetricFamily(name, doc, labels=(*self.labels, *label_names))
        edges = [*(str(float(bound)) for bound in bounds), "+Inf"]
        for label_values, distribution in observed.items():
            counts = distribution.cumulative(bounds)
            buckets = list(zip(edges, counts, strict=True))
            family.add_metric((*self.labels.values(), *label_values), buckets, distribution.total)
        return family
