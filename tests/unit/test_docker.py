"""Dockerfile and docker-compose.yml: linted, in step with the settings, and as closed as they say."""

from __future__ import annotations

import json
import os
import re
import ssl
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from config.describe import describe
from config.schema import ServerConfig
from tests.factories_tls import make_certificates

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "Dockerfile"
COMPOSE = ROOT / "docker-compose.yml"
TOOLS = Path(sys.executable).parent

SERVICES: dict[str, dict[str, Any]] = yaml.safe_load(COMPOSE.read_text())["services"]


def stages() -> dict[str, list[str]]:
    """The Dockerfile's instructions by stage, continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE)
    found: dict[str, list[str]] = {}
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        if match := re.match(r"FROM \S+ AS (\S+)", line):
            found[match[1]] = []
        elif line and found:
            found[list(found)[-1]].append(line)
    return found


def health_check(**env: str) -> subprocess.CompletedProcess[bytes]:
    """The image's health check, run here."""
    [line] = [line for line in stages()["runtime"] if line.startswith("HEALTHCHECK")]
    *shell, script = json.loads(line.split("CMD", 1)[1])
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **env}  # where it is installed it needs no path
    command = [*shell, script.replace("exec python", f"exec {sys.executable}")]
    return subprocess.run(command, env=variables, capture_output=True, check=False)


def test_hadolint_has_no_complaint() -> None:
    run = subprocess.run([TOOLS / "hadolint", DOCKERFILE], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_compose_file_follows_its_schema() -> None:
    command = [TOOLS / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", COMPOSE]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def test_variables_are_settings() -> None:
    known = {setting.env for setting in describe()}
    used = set(re.findall(r"CHAIRLIFT_[A-Z_]+", DOCKERFILE.read_text() + COMPOSE.read_text()))
    assert used
    assert used - known == set()


def test_what_is_installed_is_what_the_project_says() -> None:
    [line] = [line for line in stages()["build"] if "tomllib" in line]
    [program] = re.findall(r"python -c '(.*?)'", line)
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert run.stdout.splitlines() == project["dependencies"] + project["optional-dependencies"]["otel"]


def test_the_images_hold_no_tools_to_build_with() -> None:
    for name in ("runtime", "cpu", "cuda"):
        for line in stages()[name]:
            assert not re.match(r"RUN.*(pip|apt|gcc)", line), f"{name}: {line}"
    assert list(stages())[-1] == "cpu", "what `docker build .` makes"


def test_signals_reach_the_server_and_no_root_is_needed() -> None:
    runtime = stages()["runtime"]
    assert 'ENTRYPOINT ["chairlift"]' in runtime  # no shell in between
    assert 'CMD ["serve"]' in runtime
    assert "STOPSIGNAL SIGTERM" in runtime
    [user] = [line for line in runtime if line.startswith("USER")]
    assert re.fullmatch(r"USER [1-9]\d*:0", user)


def test_every_package_is_in_the_build_context() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = [name.rstrip("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"]]
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for name in (*packages, "pyproject.toml", "constraints.txt", project["project"]["readme"]):
        assert f"!{name}" in ignored


@pytest.mark.parametrize(("status", "exit_status"), [(200, 0), (503, 1)])
def test_the_health_check_tells_health(status: int, exit_status: int) -> None:
    with _server(status) as port:
        run = health_check(CHAIRLIFT_PORT=str(port))
    assert run.returncode == exit_status, run.stderr


def test_the_health_check_fails_when_nobody_listens() -> None:
    with _server(200) as port:
        pass  # closed again
    run = health_check(CHAIRLIFT_PORT=str(port))
    assert run.returncode == 1
    assert b"refused" in run.stdout


@pytest.mark.parametrize("clients_need_certificates", [False, True])
def test_the_health_check_asks_by_https_where_that_is_spoken(tmp_path: Path, clients_need_certificates: bool) -> None:
    make_certificates(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    env = {"CHAIRLIFT_SSL_CERTFILE": "cert.pem"}
    if clients_need_certificates:
        context.load_verify_locations(tmp_path / "ca.pem")
        context.verify_mode = ssl.CERT_REQUIRED
        env["CHAIRLIFT_SSL_CA_CERTS"] = "ca.pem"
    with _server(200, context) as port:
        assert health_check(CHAIRLIFT_PORT=str(port), **env).returncode == 0
        assert health_check(CHAIRLIFT_PORT=str(port)).returncode == 1
    assert health_check(CHAIRLIFT_PORT=str(port), **env).returncode == 1


@pytest.mark.parametrize("name", SERVICES)
def test_services_are_closed(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["restart"] == "unless-stopped"
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    if "build" not in service:
        assert re.search(r":v?\d+\.\d+\.\d+$", service["image"]), "not pinned"


@pytest.mark.parametrize("name", SERVICES)
def test_mounted_files_are_there(name: str) -> None:
    for volume in SERVICES[name]["volumes"]:
        source = volume.split(":")[0]
        if source.startswith("."):
            assert (ROOT / source).is_dir()
            assert volume.endswith(":ro")


@pytest.mark.parametrize("name", ["chairlift", "chairlift-gpu"])
def test_open_requests_may_end_before_the_container_is_killed(name: str) -> None:
    assert int(SERVICES[name]["stop_grace_period"].removesuffix("s")) > ServerConfig().shutdown_timeout + 10


def test_the_gpu_is_reserved() -> None:
    [device] = SERVICES["chairlift-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia"
    assert device["capabilities"] == ["gpu"]


def test_grafana_opens_on_the_dashboard() -> None:
    grafana = SERVICES["grafana"]
    mounts = dict(volume.split(":")[:2] for volume in grafana["volumes"])
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    [source] = [source for source, target in mounts.items() if home.startswith(target)]
    assert (ROOT / source / Path(home).name).is_file()
    provider = yaml.safe_load((ROOT / "config/grafana/provisioning/dashboards/chairlift.yml").read_text())
    assert provider["providers"][0]["options"]["path"] == str(Path(home).parent)
    assert grafana["environment"]["GF_AUTH_ANONYMOUS_ENABLED"] == "true"


def test_grafana_and_prometheus_find_each_other_and_the_server() -> None:
    sources = yaml.safe_load((ROOT / "config/grafana/provisioning/datasources/prometheus.yml").read_text())
    assert sources["datasources"][0]["url"] == "http://prometheus:9090"
    prometheus = yaml.safe_load((ROOT / "config/prometheus/prometheus.yml").read_text())
    assert prometheus["scrape_configs"][0]["static_configs"] == [{"targets": ["chairlift:8000"]}]
    assert "chairlift" in SERVICES
    assert SERVICES["chairlift-gpu"]["networks"]["default"]["aliases"] == ["chairlift"]


@contextmanager
def _server(status: int, tls: ssl.SSLContext | None = None) -> Iterator[int]:
    """A server that answers /health with `status`, and everything else with 404; its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    class Server(HTTPServer):
        def handle_error(self, *_: Any) -> None:
            pass  # of clients without certificates

    with Server(("127.0.0.1", 0), Handler) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()
