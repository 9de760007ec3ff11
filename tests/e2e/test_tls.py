"""The daemon by HTTPS: its own certificate, its clients', and the health check of its image."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from openai import OpenAI

from tests.e2e.process import ROOT, START_TIMEOUT_S, free_port, spawn, wait_until
from tests.factories_tls import make_certificates, trusting

pytestmark = pytest.mark.slow


@contextmanager
def serving(files: Path, *arguments: str) -> Iterator[tuple[int, Path]]:
    """A daemon that speaks HTTPS, with the model loaded; its port and its log."""
    port, log = free_port(), files / "log"
    certificate = ("--ssl-certfile", str(files / "cert.pem"), "--ssl-keyfile", str(files / "key.pem"))
    process = spawn(log, "--port", str(port), *certificate, *arguments)
    try:
        wait_until(lambda: "Ready: " in log.read_text() or process.poll() is not None, START_TIMEOUT_S, "not ready")
        assert process.poll() is None, log.read_text()
        yield port, log
    finally:
        process.kill()
        process.wait()


def health_check(port: int, *arguments: str) -> int:
    """Exit status of what the image asks."""
    command = [sys.executable, "-P", "-m", "server.health", "--port", str(port), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, check=False, stdout=subprocess.DEVNULL).returncode


def test_https(tmp_path: Path) -> None:
    files = make_certificates(tmp_path)
    with serving(files) as (port, log):
        url = f"https://127.0.0.1:{port}"
        assert f"Ready: smollm2 at {url}" in log.read_text()
        with httpx.Client(verify=trusting(files), trust_env=False, timeout=60) as http:
            assert http.get(f"{url}/v1/models").json()["data"][0]["id"] == "smollm2"
            sdk = OpenAI(base_url=f"{url}/v1", api_key="unused", http_client=http, max_retries=0)
            question = [{"role": "user", "content": "What is the capital of France?"}]
            stream = sdk.chat.completions.create(
                model="smollm2", messages=question, max_tokens=16, temperature=0, stream=True
            )
            assert "Paris" in "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert [health_check(port, "--tls"), health_check(port)] == [0, 1]
    assert health_check(port, "--tls") == 1


def test_clients_with_certificates_only(tmp_path: Path) -> None:
    files = make_certificates(tmp_path)
    with serving(files, "--ssl-ca-certs", str(files / "ca.pem")) as (port, _):
        url = f"https://127.0.0.1:{port}/v1/models"
        assert httpx.get(url, verify=trusting(files, "client"), trust_env=False).status_code == 200
        for shown in ("stranger", None):
            with pytest.raises(httpx.TransportError):
                httpx.get(url, verify=trusting(files, shown), trust_env=False)
        assert [health_check(port, "--tls", "--handshake"), health_check(port, "--tls")] == [0, 1]
    assert health_check(port, "--tls", "--handshake") == 1
