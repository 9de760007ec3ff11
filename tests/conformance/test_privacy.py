"""22 and 23: keys, and what is told to whom."""

from __future__ import annotations

import http.client
import json
from urllib.parse import urlsplit

import httpx
import pytest

from tests.conformance.api import BODIES, CHAT, COMPLETIONS, Api, error_in, error_of
from tests.e2e.process import Daemon

LOCKED = [
    ("GET", "/v1/models"),
    ("POST", COMPLETIONS),
    ("POST", CHAT),
    ("POST", "/v1/responses"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/metrics"),
    ("GET", "/version"),
]
PROBES = ("/live", "/ready", "/health")
SECRET = "xylophone-quartz-91"
"""In prompts that are sent; nobody else is to see it."""


def wrong_headers(key: str) -> dict[str, str | None]:
    return {
        "none": None,
        "empty": "",
        "no scheme": key,
        "another scheme": f"Basic {key}",
        "scheme only": "Bearer",
        "wrong": "Bearer wrong",
        "a beginning": f"Bearer {key[:-1]}",
        "more": f"Bearer {key}x",
    }


@pytest.mark.parametrize(("method", "path"), LOCKED, ids=[path for _, path in LOCKED])
def test_22_without_the_key_nothing_is_answered(api: Api, key: str, method: str, path: str) -> None:
    if not api.is_ours and not path.startswith("/v1/"):
        pytest.skip("not OpenAI's: another server may answer everyone")
    for kind, header in wrong_headers(key).items():
        headers = {} if header is None else {"Authorization": header}
        response = httpx.request(method, api.base_url + path, headers=headers, json=BODIES.get(path, {}), timeout=60.0)
        assert response.status_code == 401, kind
        error = error_of(response)
        assert key not in response.text
        assert error["code"] == "invalid_api_key"


@pytest.mark.parametrize("path", PROBES)
def test_22_probes_need_no_key(api: Api, key: str, path: str) -> None:
    del key  # there is one
    if not api.is_ours:
        pytest.skip("not OpenAI's")
    assert httpx.get(api.base_url + path, timeout=60.0).status_code == 200


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_22_the_key_is_checked_before_the_body_is_read(api: Api, key: str, path: str) -> None:
    """None is ever sent: a server that waits for it does not answer."""
    del key
    url = urlsplit(api.base_url)
    kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    connection = kind(url.netloc, timeout=20.0)
    try:
        connection.putrequest("POST", path)
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", "1000000")
        connection.endheaders()
        response = connection.getresponse()
        assert response.status == 401
        error_in(json.loads(response.read()))
    finally:
        connection.close()


def send_secrets(api: Api) -> list[httpx.Response]:
    """Requests with a secret in their prompts: two that work, the others refused, each for another reason."""
    headers = {"content-type": "application/json"}
    broken = b'{"prompt": "%s", "max_tokens": }' % SECRET.encode()
    parts = [{"type": "input_audio", "input_audio": {"data": SECRET, "format": "wav"}}]
    message = {"role": "user", "content": SECRET}
    return [
        api.post(COMPLETIONS, {"prompt": f"{SECRET} is", "max_tokens": 2}),
        api.post(CHAT, {"messages": [message], "max_tokens": 2}),
        api.post(COMPLETIONS, {"prompt": f"{SECRET} is", "temperature": -1, "max_tokens": 2}),
        api.post(COMPLETIONS, {"prompt": f"{SECRET} " * 20_000, "max_tokens": 2}),
        api.post(COMPLETIONS, {"prompt": {"text": f"my long secret is {SECRET}"}, "max_tokens": 2}),
        api.post(CHAT, {"messages": [message | {"content": parts}], "max_tokens": 2}),
        api.post(
            CHAT,
            {"messages": [message, message | {"role": f"nobody, and {SECRET} is not to be told"}], "max_tokens": 2},
        ),
        api.http.post(COMPLETIONS, content=broken, headers=headers),
    ]


def test_23_errors_and_metrics_tell_nothing_of_prompts_and_keys(api: Api) -> None:
    accepted, refused = [], []
    for response in send_secrets(api):
        (accepted if response.status_code == 200 else refused).append(response)
    # What must be refused is for other cases to say
    assert refused
    assert (len(accepted), len(refused)) == (2, 6) or not api.is_ours
    for response in refused:
        assert SECRET not in response.text
        if api.is_ours:
            error_of(response)
    metrics = api.http.get("/metrics").text
    assert SECRET not in metrics
    assert api.key is None or api.key not in metrics


def test_23_the_log_has_no_prompts_no_keys_and_no_line_for_a_probe(api: Api, log: Daemon) -> None:
    """Its begins with what the server says of itself; a request has its line."""
    send_secrets(api)
    for path in PROBES:
        assert api.http.get(f"{path}?{SECRET}").status_code == 200
    httpx.get(f"{api.base_url}/v1/models?key={SECRET}", headers={"Authorization": f"Bearer {SECRET}"}, timeout=60.0)
    text = log.log
    assert "GET /v1/models 401" in text
    assert SECRET not in text
    assert api.key is not None
    assert api.key not in text
    assert not any(f"GET {path}" in text for path in PROBES)
