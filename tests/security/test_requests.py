"""Requests made to harm the server, or to have it harm others: what has been done so to other servers of this kind."""

from __future__ import annotations

import gzip
import json
import logging
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, unquote

import pytest

from engine.errors import RequestError
from engine.text.tokenizer import Tokenizer
from server.errors import to_api_error
from server.logs import configure_logging
from server.metrics import Metrics
from tests import factories_text
from tests.factories_engine import FakeEngine
from tests.factories_http import make_app, make_client

pytestmark = pytest.mark.anyio

USER = {"role": "user", "content": "hi"}
CHATS = ("/v1/chat/completions", "/v1/responses", "/tokenize")


def chat_of(path: str, message: dict[str, Any] = USER, **fields: Any) -> dict[str, Any]:
    """A request with one message, for each route that takes any."""
    return {"input" if path == "/v1/responses" else "messages": [message], **fields}


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What was asked for outside; nothing gets there."""
    asked: list[Any] = []

    def refuse(*arguments: Any, **_: Any) -> None:
        asked.append(arguments)
        raise OSError("no network")

    for name in ("socket.socket.connect", "socket.getaddrinfo", "urllib.request.urlopen", "httpx.get"):
        monkeypatch.setattr(name, refuse)
    yield asked
    with pytest.raises(OSError, match="no network"):  # or the test shows nothing
        socket.create_connection(("127.0.0.1", 9))


URLS = ("http://169.254.169.254/latest/meta-data/", "file:///etc/passwd", "https://x\\@127.0.0.1/", "data:image/png,x")
PARTS = (
    lambda url: {"type": "image_url", "image_url": {"url": url}},
    lambda url: {"type": "image_url", "image_url": url},
    lambda url: {"type": "video_url", "video_url": {"url": url}},
    lambda url: {"type": "audio_url", "audio_url": {"url": url}},
    lambda url: {"type": "input_audio", "input_audio": {"data": url, "format": "wav"}},
    lambda url: {"type": "image_embeds", "image_embeds": url},
    lambda url: {"type": "prompt_embeds", "prompt_embeds": url},
    lambda url: {"type": "input_image", "image_url": url},
    lambda url: {"type": "input_file", "file_url": url},
    lambda url: {"type": "file", "file": {"file_id": url}},
)


@pytest.mark.parametrize("path", CHATS)
@pytest.mark.parametrize("url", URLS)
async def test_no_url_is_fetched(no_network: list[Any], path: str, url: str) -> None:
    engine = FakeEngine()
    async with make_client(engine) as client:
        for part in PARTS:
            answer = await client.post(path, json=chat_of(path, {"role": "user", "content": [part(url)]}))
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"].endswith("content[0].type")
    assert (no_network, engine.calls) == ([], [])


@pytest.mark.parametrize("path", ["/v1/completions", *CHATS])
async def test_no_field_says_where_to_ask(no_network: list[Any], path: str) -> None:
    """An unknown field is ignored: what it would reach elsewhere, it does not reach here."""
    fields = {"api_base": URLS[0], "base_url": URLS[0], "user_config": {"api_base": URLS[0]}, "lora_path": "/etc"}
    async with make_client() as client:
        body = {"prompt": "hi"} if path == "/v1/completions" else chat_of(path)
        answer = await client.post(path, json=body | fields, headers={"X-Request-Id": "___prefill_addr_127.0.0.1:9___"})
    assert answer.status_code == 200, answer.text
    assert no_network == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt_embeds", "UEsDBAAA"),
        ("chat_template", "{{ 1 }}"),
        ("kv_transfer_params", {"remote_host": "127.0.0.1"}),
        ("ec_transfer_params", {"remote_host": "127.0.0.1"}),
        ("vllm_xargs", {"a": 1}),
        ("guided_decoding_backend", "outlines"),
        ("media_io_kwargs", {"video": {"num_frames": 10**9}}),
        ("mm_processor_kwargs", {"max_pixels": 10**12}),
        ("logprob_token_ids", list(range(1000))),
        ("thinking_token_budget", 5),
        ("bad_words", ["a"]),
    ],
)
async def test_what_reaches_into_other_servers_is_refused_by_name(field: str, value: Any) -> None:
    async with make_client() as client:
        for path, body in (("/v1/completions", {"prompt": "hi"}), ("/v1/chat/completions", {"messages": [USER]})):
            error = (await client.post(path, json=body | {field: value})).json()["error"]
            assert (error["param"], error["code"]) == (field, "unsupported_parameter")


@pytest.mark.parametrize("path", CHATS)
@pytest.mark.parametrize(
    "name",
    [
        *("tokenize", "chat_template", "return_dict", "return_tensors", "max_length", "truncation", "padding"),
        *("messages", "conversation", "tools", "documents", "add_generation_prompt", "continue_final_message"),
        *("tokenizer_kwargs", "return_assistant_tokens_mask", "self", "raise_exception", "bos_token", "__class__"),
    ],
)
async def test_no_input_of_the_template_but_its_switches_can_be_set(path: str, name: str) -> None:
    engine = FakeEngine()
    async with make_client(engine) as client:
        answer = await client.post(path, json=chat_of(path, chat_template_kwargs={name: True}))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "chat_template_kwargs"
    assert engine.tokenizer.chats == []


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "gzip, gzip"])
async def test_nothing_is_decompressed(encoding: str) -> None:
    """16 KB would become 16 MB, and those as many again."""
    bomb = gzip.compress(json.dumps({"prompt": "a" * 2**24}).encode())
    headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
    async with make_client() as client:
        answer = await client.post("/v1/completions", content=bomb, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_json"


async def get(app: Any, target: str, host: str = "test", key: str | None = None) -> tuple[int, str]:
    """Status and text of an answer. Clients would put the target in order first."""
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b""}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", host.encode())] + [(b"authorization", f"Bearer {key}".encode())] * (key is not None)
    scope = {
        "type": "http",
        "http_version": "1.1",
        "scheme": "http",
        "method": "GET",
        "query_string": b"",
        "root_path": "",
    }
    path = {"path": unquote(target), "raw_path": target.encode()}  # as uvicorn has it
    await app(scope | path | {"headers": headers, "client": ("127.0.0.1", 1), "server": None}, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:]).decode()


async def test_no_way_of_writing_a_path_or_a_host_goes_round_the_key() -> None:
    app = make_app(FakeEngine(), api_key=("secret",))
    assert (await get(app, "/v1/models", key="secret"))[0] == 200
    assert (await get(app, "/health"))[0] == 200
    for host in ("test", "test/health", "test/?", "test/health#", "test/health?x=", "127.0.0.1/live", "", "/health"):
        for target in (
            *("/v1/models", "/metrics", "/health/../v1/models", "/live/..;/v1/models", "//v1/models", "/health/"),
            *("/health//", "/HEALTH", "/v1/models;/health", "/health%2f..%2fv1/models", "/./health", "/v1/../health"),
            *("/health%00", "/ready.json", "//health", "/%2e/health", "", "*", "http://x/health/../v1/models"),
        ):
            assert (await get(app, target, host))[0] == 401, (target, host)


@pytest.mark.parametrize("name", ["../../etc/passwd", "..%2f..%2fetc%2fpasswd", "%00", "resp_" + "0" * 48, "a" * 5000])
async def test_ids_are_looked_up_and_are_no_paths(name: str) -> None:
    app = make_app(FakeEngine())
    for path in (f"/v1/models/{name}", f"/v1/responses/{name}"):
        status, text = await get(app, path)
        assert (status, "root:" in text) == (404, False)
    async with make_client() as client:
        for body in ({"model": name}, {"previous_response_id": name}):
            answer = await client.post("/v1/responses", json={"input": "hi", **body})
            assert answer.status_code == 404
            assert len(answer.text) < 1000


FORGED = "2026-01-01 00:00:00 INFO server: all is well"


@pytest.mark.parametrize("log_format", ["text", "json"])
async def test_no_client_writes_a_line_of_the_log(capsys: pytest.CaptureFixture[str], log_format: Any) -> None:
    before = logging.getLogger().handlers[:], logging.getLogger().level
    try:
        configure_logging("debug", log_format)
        async with make_client(log_prompts=True) as client:
            for end in ("\n", "\r", "\x1b[2K", "\x85", "\u2028"):
                text = f"x{end}{FORGED}"
                await client.post("/v1/completions", json={"prompt": text, "user": text, "max_tokens": 1})
                await client.post("/v1/completions", json={"prompt": "x", "model": text})
                await client.post(f"/{quote(text)}")
                await client.get("/v1/models", headers={"X-Request-Id": text.encode("latin-1", "replace")})
    finally:
        logging.getLogger().handlers[:], level = before
        logging.getLogger().setLevel(level)
    said = capsys.readouterr().err
    assert "prompt" in said
    assert "\x1b" not in said
    assert not any(line.startswith(FORGED) for line in said.splitlines())  # which breaks at all of them


async def test_what_clients_send_makes_no_series_of_metrics() -> None:
    engine = FakeEngine()
    metrics = Metrics(engine)  # type: ignore[arg-type]
    async with make_client(engine, metrics) as client:
        first = (await client.get("/metrics")).text
        for i in range(50):
            await client.request(f"METHOD{i}", "/v1/models")
            await client.get(f"/path{i}", headers={"X-Request-Id": f"id{i}"})
            await client.post("/v1/completions", json={"prompt": "hi", "model": f"model{i}", "user": f"user{i}"})
        last = (await client.get("/metrics")).text
    added = {line.rpartition(" ")[0] for line in last.splitlines()} - {
        line.rpartition(" ")[0] for line in first.splitlines()
    }
    assert len(added) < 10, added
    assert not any(name in last for name in ("METHOD4", "path4", "id4", "model4", "user4"))


@pytest.mark.parametrize("source", ["{{ {}[raise_exception].x }}", "{{ raise_exception(raise_exception) }}"])
def test_no_error_tells_where_anything_lies_in_memory(source: str) -> None:
    tokenizer = Tokenizer(factories_text.hf_byte_level(chat_template=source))
    with pytest.raises(RequestError) as caught:
        tokenizer.render_chat([USER])
    assert " at 0x" in str(caught.value)  # or this shows nothing
    message = to_api_error(caught.value).message
    assert "0x" not in message
    assert "function" in message


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_special_tokens_in_a_message_are_tokens_and_nothing_worse() -> None:
    """As in transformers, and in vLLM: the README says that they are to be taken out of what strangers write."""
    tokenizer = Tokenizer(factories_text.hf_byte_level(chat_template=CHATML))
    special = tokenizer.decode(sorted(tokenizer.special_token_ids), skip_special_tokens=False)
    text = tokenizer.render_chat([{"role": "user", "content": special * 100}])
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert special in text
    assert all(ids.count(each) >= 100 for each in tokenizer.special_token_ids)
    assert max(ids) < tokenizer.vocab_size
