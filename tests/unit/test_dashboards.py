"""The dashboard and the alert rules ask for what the server publishes, and are well formed."""

from __future__ import annotations

import itertools
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.metric_names import expressions_in, metric_names_in, missing_from, names_in
from tests.metrics_factory import make_busy_metrics

CONFIG = Path(__file__).parents[2] / "config"
OVERVIEW = CONFIG / "grafana" / "dashboards" / "overview.json"
RULES = CONFIG / "prometheus" / "rules.yml"

_on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the figures of /proc")

QUERIES = [
    pytest.param(expr, id=f"{path.stem}: {expr}", marks=_on_linux if "process_" in expr else ())
    for path in (*OVERVIEW.parent.glob("*.json"), *RULES.parent.glob("rules*.yml"))
    for expr in expressions_in(path)
]


@pytest.fixture(scope="module")
def scrape() -> bytes:
    """Without the `vllm:*` names, which can be switched off: our own dashboard must not need them."""
    return make_busy_metrics(vllm_names=False).render()[0]


@pytest.mark.parametrize("expr", QUERIES)
def test_queries_find_what_they_ask_for(expr: str, scrape: bytes) -> None:
    assert missing_from(scrape, expr) == []


@pytest.mark.parametrize(
    ("expr", "missing"),
    [
        ("rate(chairlift_prompt_tokens[5m])", ["chairlift_prompt_tokens"]),
        ("up == 0 or chairlift_typo > 1", ["chairlift_typo"]),
        ('chairlift_requests_running{modle="x"}', ["chairlift_requests_running{modle}"]),
        ("sum by (resaon) (chairlift_requests_finished_total)", ["by (resaon)"]),
    ],
)
def test_a_wrong_name_is_found(expr: str, missing: list[str], scrape: bytes) -> None:
    assert missing_from(scrape, expr) == missing


def test_names_in_a_document_are_found(tmp_path: Path, scrape: bytes) -> None:
    page = tmp_path / "page.md"
    page.write_text("`chairlift_step_tokens`, `vllm:num_requests_running` and `chairlift_requests_finished_total{a}`")
    assert metric_names_in(page) == {
        "chairlift_step_tokens",
        "vllm:num_requests_running",
        "chairlift_requests_finished_total",
    }
    assert metric_names_in(page) - names_in(scrape) == {"vllm:num_requests_running"}


def test_the_dashboard_is_what_its_program_writes() -> None:
    program = runpy.run_path(str(CONFIG / "grafana" / "overview.py"))
    assert OVERVIEW.read_text(encoding="utf-8") == program["as_text"](), "run: python config/grafana/overview.py"


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in _panels():
        at = panel["gridPos"]
        cells = set(itertools.product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])))
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_every_panel_says_what_it_shows_and_in_which_unit() -> None:
    panels = _panels()
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        if panel["type"] == "row":
            continue
        assert panel["description"], panel["title"]
        units = panel["fieldConfig"]["defaults"].get("unit") or panel["options"]["yAxis"]["unit"]
        assert units, panel["title"]
        refs = [target["refId"] for target in panel["targets"]]
        assert refs, panel["title"]
        assert len(set(refs)) == len(refs), panel["title"]


def test_every_alert_says_what_to_do() -> None:
    alerts = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    assert len({alert["alert"] for alert in alerts}) == len(alerts)
    for alert in alerts:
        assert alert["labels"]["severity"] in ("page", "ticket"), alert["alert"]
        assert alert["annotations"]["summary"], alert["alert"]
        assert len(alert["annotations"]["description"]) > 50, alert["alert"]
        assert alert["for"], alert["alert"]


def test_prometheus_scrapes_the_job_that_the_rules_ask_for() -> None:
    config = yaml.safe_load((RULES.parent / "prometheus.yml").read_text())
    assert config["rule_files"] == [RULES.name]
    [job] = config["scrape_configs"]
    assert f'job="{job["job_name"]}"' in RULES.read_text()


def _panels() -> list[dict[str, Any]]:
    panels: list[dict[str, Any]] = json.loads(OVERVIEW.read_text())["panels"]
    return panels
