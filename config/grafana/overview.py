"""Writes dashboards/overview.json: `python config/grafana/overview.py`. A test holds the file against this program.

To change the dashboard, change the panels below and run it. A panel tried out in Grafana itself comes back as its
query and a line here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

Panel = dict[str, Any]
Target = dict[str, Any]

OUTPUT = Path(__file__).parent / "dashboards" / "overview.json"
WIDTH = 24
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
SERVED = '{model_name=~"$model",instance=~"$instance"}'
FAILED = '{model_name=~"$model",instance=~"$instance",reason="error"}'
PROCESS = '{instance=~"$instance",job="chairlift"}'
QUANTILES = (0.5, 0.9, 0.99)
COLORS = {
    "p50": {"p50": "green"},
    "p90": {"p90": "yellow"},
    "p99": {"p99": "red"},
    "{{reason}}": {"error": "red", "abort": "orange"},
}
"""By a query's legend: its series' colours, where the palette's would mislead."""


def rate(counter: str, *by: str, where: str = SERVED) -> str:
    """Per second, summed over everything but the labels `by`."""
    grouping = f" by ({', '.join(by)})" if by else ""
    return f"sum{grouping}(rate({counter}{where}[$__rate_interval]))"


def mean(histogram: str, *by: str) -> str:
    """Mean of what a histogram observed lately."""
    return f"{rate(f'{histogram}_sum', *by)} / {rate(f'{histogram}_count', *by)}"


def quantile(q: float, histogram: str) -> str:
    """Quantile of what a histogram observed lately."""
    return f"histogram_quantile({q:g}, {rate(f'{histogram}_bucket', 'le')})"


def total(gauge: str) -> str:
    """A gauge, summed over instances."""
    return f"sum({gauge}{SERVED})"


def query(expr: str, legend: str = "", **more: Any) -> Target:
    """One query of a panel. `legend` may name labels: `{{reason}}`."""
    return {"expr": expr, "legendFormat": legend or "__auto", **more}


def quantiles(histogram: str) -> list[Target]:
    """p50, p90 and p99."""
    return [query(quantile(q, histogram), f"p{100 * q:g}") for q in QUANTILES]


def graph(title: str, unit: str, targets: Sequence[Target], doc: str, *, stack: bool = False, **limits: float) -> Panel:
    """A panel of lines, or of stacked areas. `limits`: min, max of the axis."""
    custom = {
        "lineWidth": 1 if stack else 2,
        "fillOpacity": 40 if stack else 8,
        "gradientMode": "none" if stack else "opacity",
        "showPoints": "never",
        "spanNulls": False,
        "stacking": {"mode": "normal" if stack else "none"},
    }
    return {
        "type": "timeseries",
        "title": title,
        "description": doc,
        "targets": targets,
        "fieldConfig": {
            "defaults": {"unit": unit, "min": 0, "custom": custom, **limits},
            "overrides": [
                _color(name, color)
                for target in targets
                for name, color in COLORS.get(target["legendFormat"], {}).items()
            ],
        },
        "options": {
            "legend": {"displayMode": "table", "placement": "bottom", "calcs": ["mean", "max", "lastNotNull"]},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
    }


def stat(title: str, unit: str, expr: str, doc: str, warn: float | None = None, alarm: float | None = None) -> Panel:
    """A number with its course behind it; yellow from `warn`, red from `alarm`."""
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    steps += [{"color": c, "value": v} for c, v in (("yellow", warn), ("red", alarm)) if v is not None]
    return {
        "type": "stat",
        "title": title,
        "description": doc,
        "targets": [query(expr, title)],
        "fieldConfig": {
            "defaults": {"unit": unit, "decimals": 1, "thresholds": {"mode": "absolute", "steps": steps}},
            "overrides": [],
        },
        "options": {
            "colorMode": "value",
            "graphMode": "area",
            "reduceOptions": {"calcs": ["lastNotNull"]},
        },
    }


def heatmap(title: str, unit: str, histogram: str, doc: str) -> Panel:
    """A histogram's buckets over time."""
    expr = f"sum by (le)(increase({histogram}_bucket{SERVED}[$__rate_interval]))"
    return {
        "type": "heatmap",
        "title": title,
        "description": doc,
        "targets": [query(expr, "{{le}}", format="heatmap")],
        "fieldConfig": {"defaults": {}, "overrides": []},
        "options": {
            "calculate": False,
            "yAxis": {"unit": unit},
            "color": {"mode": "scheme", "scheme": "Turbo", "steps": 64, "exponent": 0.5, "scale": "exponential"},
            "filterValues": {"le": 1e-9},
            "cellGap": 1,
            "tooltip": {"mode": "single", "yHistogram": True},
        },
    }


def now() -> list[Panel]:
    """The strip of numbers at the top."""
    ttft, itl = "chairlift_time_to_first_token_seconds", "chairlift_inter_token_latency_seconds"
    failed = rate("chairlift_requests_finished_total", where=FAILED)
    return [
        stat("Running", "short", total("chairlift_requests_running"), "Requests in the steps now."),
        stat("Waiting", "short", total("chairlift_requests_waiting"), "Requests in the queue now.", 1, 50),
        stat("KV cache", "percentunit", f"max(chairlift_kv_cache_usage_ratio{SERVED})", "In use now.", 0.8, 0.95),
        stat("Prompt tokens/s", "short", rate("chairlift_prompt_tokens_total"), "Prompts taken in, cached ones too."),
        stat("Generated tokens/s", "short", rate("chairlift_generated_tokens_total"), "Over all requests."),
        stat("First token, p90", "s", quantile(0.9, ttft), "From arrival to the first token.", 2, 5),
        stat("Next token, p90", "s", quantile(0.9, itl), "From one token to the next.", 0.1, 0.25),
        stat("Failures/s", "short", failed, "Requests that ended by an error.", 0.001, 0.1),
    ]


def traffic() -> list[Panel]:
    """What clients see."""
    parts = [query(mean(f"chairlift_request_{part}_seconds"), part) for part in ("queue", "prefill", "decode")]
    return [
        graph(
            "Tokens per second",
            "short",
            [
                query(rate("chairlift_prompt_tokens_total"), "prompt"),
                query(rate("chairlift_cached_prompt_tokens_total"), "prompt, from the cache"),
                query(rate("chairlift_generated_tokens_total"), "generated"),
            ],
            "Prompt tokens count when their request begins to run; those from the prefix cache cost nothing.",
        ),
        graph(
            "Requests per second, by how they ended",
            "reqps",
            [query(rate("chairlift_requests_finished_total", "reason"), "{{reason}}")],
            "`length` is the cap on tokens, `abort` a client that left, `error` a fault here.",
            stack=True,
        ),
        graph(
            "Time to first token",
            "s",
            quantiles("chairlift_time_to_first_token_seconds"),
            "From arrival: the queue and the prompt's prefill.",
        ),
        graph(
            "Inter-token latency",
            "s",
            quantiles("chairlift_inter_token_latency_seconds"),
            "From one token of a request to its next: a step, and now and then a prompt beside it.",
        ),
        heatmap(
            "Time to first token, every request",
            "s",
            "chairlift_time_to_first_token_seconds",
            "Two bands are two kinds of traffic: prompts that are in the cache, and prompts that are not.",
        ),
        graph("Where a request's time goes (mean)", "s", parts, "Queue, prefill, decode.", stack=True),
    ]


def queue() -> list[Panel]:
    """Who waits, and for what."""
    hits = f"{rate('chairlift_cached_prompt_tokens_total')} / {rate('chairlift_prompt_tokens_total')}"
    lengths = [
        query(quantile(q, f"chairlift_request_{what}_tokens"), f"{what} p{100 * q:g}")
        for what in ("prompt", "generated")
        for q in (0.5, 0.9)
    ]
    return [
        graph(
            "Running and waiting",
            "short",
            [
                query(total("chairlift_requests_running"), "running"),
                query(total("chairlift_requests_waiting"), "waiting"),
            ],
            "Waiting with room in the KV cache: --max-num-seqs is the limit.",
        ),
        graph(
            "Time in the queue",
            "s",
            quantiles("chairlift_request_queue_seconds"),
            "From arrival to the first step.",
        ),
        graph(
            "KV cache in use",
            "percentunit",
            [query(f"chairlift_kv_cache_usage_ratio{SERVED}", "{{instance}}")],
            "By running requests. Cached prompts that nobody uses count as free.",
            max=1,
        ),
        graph(
            "Preemptions per second",
            "short",
            [query(rate("chairlift_preemptions_total"), "preemptions")],
            "Requests put back into the queue because the KV cache was full; their tokens are computed again.",
        ),
        graph(
            "Prompt tokens from the prefix cache",
            "percentunit",
            [query(hits, "hits")],
            "Share of prompt tokens that need no computing.",
            max=1,
        ),
        graph("Lengths of requests, in tokens", "short", lengths, "Of requests that ended by `stop` or `length`."),
    ]


def steps() -> list[Panel]:
    """What the engine does, step by step."""
    phases = [query(mean("chairlift_step_phase_seconds", "phase"), "{{phase}}")]
    return [
        graph(
            "Tokens in a step",
            "short",
            [*quantiles("chairlift_step_tokens"), query(mean("chairlift_step_tokens"), "mean")],
            "At most --max-num-batched-tokens.",
        ),
        graph(
            "Requests in a step",
            "short",
            [*quantiles("chairlift_step_rows"), query(mean("chairlift_step_rows"), "mean")],
            "At most --max-num-seqs.",
        ),
        graph(
            "Computed tokens per second",
            "short",
            [query(rate("chairlift_computed_tokens_total", "kind"), "{{kind}}")],
            "Prefill beside decode: the batch's composition. Recomputing after preemptions is prefill.",
            stack=True,
        ),
        graph("A step's time, by phase (mean)", "s", phases, "All but `forward` should be thin.", stack=True),
        graph(
            "Steps per second",
            "short",
            [query(rate("chairlift_step_tokens_count"), "steps")],
            "As many tokens as this come to one stream each second.",
        ),
        graph(
            "Age of the last step",
            "s",
            [
                query(f"max(chairlift_last_step_age_seconds{SERVED})", "since the last step"),
                query(f"max(chairlift_step_in_progress_seconds{SERVED})", "step in progress"),
            ],
            "Grows while idle; with requests running or waiting it means that the engine hangs.",
        ),
    ]


def server() -> list[Panel]:
    """Refusals, HTTP, and the process."""
    return [
        graph(
            "Requests refused per second, by reason",
            "reqps",
            [query(rate("chairlift_requests_rejected_total", "reason"), "{{reason}}")],
            "Before they reached the engine.",
            stack=True,
        ),
        graph(
            "HTTP responses per second",
            "reqps",
            [query(rate("chairlift_http_responses_total", "route", "status"), "{{status}} {{route}}")],
            "By status and route.",
        ),
        graph(
            "Event-loop lag",
            "s",
            quantiles("chairlift_event_loop_lag_seconds"),
            "By how much timers come late: tokenising long prompts, templates, very many streams.",
        ),
        graph(
            "CPU",
            "short",
            [query(f"rate(process_cpu_seconds_total{PROCESS}[$__rate_interval])", "{{instance}}")],
            "Cores in use.",
        ),
        graph(
            "Memory",
            "bytes",
            [query(f"process_resident_memory_bytes{PROCESS}", "{{instance}}")],
            "Of the process; not a GPU's.",
        ),
        graph("Open files", "short", [query(f"process_open_fds{PROCESS}", "{{instance}}")], "One for each client."),
    ]


def laid_out() -> Iterator[Panel]:
    """All panels, in their places: a strip of numbers, then sections of graphs."""
    sections = (
        ("Now", now(), 3, 4),
        ("Throughput and latency", traffic(), 12, 8),
        ("Queue and KV cache", queue(), 8, 8),
        ("Steps", steps(), 8, 8),
        ("Refusals, HTTP and process", server(), 8, 8),
    )
    y = 0
    for title, panels, width, height in sections:
        yield {"type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": _place(0, y, WIDTH, 1)}
        y += 1
        per_line = WIDTH // width
        for i, panel in enumerate(panels):
            place = _place(i % per_line * width, y + i // per_line * height, width, height)
            targets = [
                {"refId": ref, "datasource": DATASOURCE, **target}
                for ref, target in zip("ABCDEFGH", panel["targets"], strict=False)
            ]
            yield {**panel, "datasource": DATASOURCE, "targets": targets, "gridPos": place}
        y += -(-len(panels) // per_line) * height


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana's JSON model."""
    return {
        "uid": "chairlift-overview",
        "title": "Chairlift",
        "description": "One look at a Chairlift server: traffic, latency, queue, KV cache, steps, errors.",
        "tags": ["chairlift", "llm"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,  # one crosshair over all panels
        "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": [_alerts()]},
        "templating": {
            "list": [
                {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
                _variable("model", "Model", "label_values(chairlift_requests_running, model_name)"),
                _variable(
                    "instance", "Instance", 'label_values(chairlift_requests_running{model_name=~"$model"}, instance)'
                ),
            ]
        },
        "panels": [{"id": number, **panel} for number, panel in enumerate(laid_out(), start=1)],
    }


def _alerts() -> dict[str, Any]:
    return {
        "name": "Alerts",
        "datasource": DATASOURCE,
        "enable": True,
        "iconColor": "red",
        "expr": 'ALERTS{alertstate="firing",alertname=~"Chairlift.*"}',
        "titleFormat": "{{alertname}}",
        "textFormat": "{{instance}}",
    }


def _variable(name: str, label: str, values: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": values, "refId": name},
        "refresh": 2,  # when the time range changes
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _color(name: str, color: str) -> dict[str, Any]:
    fixed = {"id": "color", "value": {"mode": "fixed", "fixedColor": color}}
    return {"matcher": {"id": "byName", "options": name}, "properties": [fixed]}


def _place(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def as_text() -> str:
    """What the file holds."""
    return json.dumps(dashboard(), indent=2) + "\n"


if __name__ == "__main__":
    OUTPUT.write_text(as_text(), encoding="utf-8")
