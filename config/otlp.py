"""What OpenTelemetry's own variables say of where traces go: the same ones for every program of a deployment.

They are a default of `otlp_traces_endpoint`, so `chairlift config show` tells where it came from. What they ask for and
cannot be had is a warning, not an error: they may be meant for others.
https://opentelemetry.io/docs/specs/otel/protocol/exporter/ and .../configuration/sdk-environment-variables/
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata

from config.describe import describe
from config.values import parse

_PACKAGE = "opentelemetry-exporter-otlp-proto-http"
_PROTOCOL = "http/protobuf"


@dataclass(frozen=True, slots=True)
class Found:
    """A URL for traces."""

    url: str
    variable: str
    """That says so."""
    problem: str | None
    """Why traces cannot be sent there."""


def find(environ: Mapping[str, str]) -> Found | None:
    """Where the variables send traces; None if they say nothing, or that there are to be none."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    if (environ.get("OTEL_TRACES_EXPORTER") or "otlp").strip() != "otlp":
        return None
    if url := environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        return _found(url, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", environ)
    if base := environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
        return _found(base.removesuffix("/") + "/v1/traces", "OTEL_EXPORTER_OTLP_ENDPOINT", environ)
    return None


def _found(url: str, variable: str, environ: Mapping[str, str]) -> Found:
    protocols = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    protocol = next((value for name in protocols if (value := environ.get(name))), _PROTOCOL)
    [setting] = [setting for setting in describe() if setting.name == "otlp_traces_endpoint"]
    problem = None
    try:
        parse(url, setting.base_hint, setting.rules)
    except ValueError as error:
        problem = str(error)
    if protocol != _PROTOCOL:
        problem = f"traces are sent by {_PROTOCOL}, not by {protocol}"
    elif problem is None and not _is_installed():
        problem = "traces need OpenTelemetry (pip install '.[otel]')"
    return Found(url, variable, problem)


def _is_installed() -> bool:
    """Whether the extra `otel` is there; without importing it."""
    try:
        metadata.version(_PACKAGE)
    except metadata.PackageNotFoundError:
        return False
    return True
