"""One bad value at a time, in every place of every body: 4xx with the place's name, and nobody else notices.

Places and what may stand there come from the OpenAPI document (`tests.e2e.places`), so a new field is looked at without
a line here. `tests/integration/test_http_bad_fields.py` is the same in a few seconds, with a fake engine.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import httpx
import pytest

from tests.chaos.model import save_served_model
from tests.e2e.bad_values import KEYS, error_of, explains, others_for, wrong_for
from tests.e2e.places import MODEL, Json, Place, Walk
from tests.e2e.process import Daemon, running
from tests.factories_engine import FakeEngine
from tests.factories_http import make_app

pytestmark = pytest.mark.slow

DOCUMENT = make_app(FakeEngine()).openapi()
WALK = Walk(DOCUMENT)
PLACES = list(WALK.places())

TEMPLATE = """{% if tools %}<|im_start|>system
Call them as <tool_call>: {{ tools | tojson }}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.reasoning_content or "" }}{{ message.content or "" }}{% for call in message.tool_calls or [] %}
<tool_call>{{ call.function.name }} {{ call.function.arguments | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Takes all roles, and shows all that messages have."""


def each_place(places: list[Place]) -> pytest.MarkDecorator:
    """Parametrized with these."""
    ids = [f"{place.route}-{place.name}{place.kind}" for place in places]
    return pytest.mark.parametrize("place", places, ids=ids)


class Neighbour:
    """A stream that runs again and again, and must say the same each time."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self.texts: list[str] = []
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Neighbour:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        body = {"prompt": "Mountains are", "max_tokens": 60, "temperature": 0, "ignore_eos": True, "stream": True}
        while not self._stop.is_set() or not self.texts:
            with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=60.0) as response:
                self.texts.append(text_of(response.read()))


def text_of(stream: bytes) -> str:
    """A stream's text. How it was cut depends on how fast it was read."""
    *events, done = [event.removeprefix(b"data: ") for event in stream.split(b"\n\n") if event.startswith(b"data: ")]
    assert done == b"[DONE]"
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One of its own, with a tiny model: there are thousands of requests, some with long prompts."""
    directory = tmp_path_factory.mktemp("places")
    model = str(save_served_model(directory / "model", chat_template=TEMPLATE))
    arguments = ("--model", model, "--served-model-name", MODEL, "--num-threads", "1")
    with running(directory / "log", *arguments) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def neighbour(daemon: Daemon) -> Iterator[Neighbour]:
    with Neighbour(daemon.url) as running:
        yield running
    assert len(set(running.texts)) == 1, "a bad request changed another one's text"
    assert len(running.texts[0]) > 50


@pytest.fixture(scope="module")
def client(daemon: Daemon) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=daemon.url, timeout=60.0) as client:
        yield client


def send(client: httpx.Client, place: Place, body: Json) -> httpx.Response:
    content = json.dumps(body)  # httpx itself refuses what the server must
    return client.post(place.route, content=content, headers={"content-type": "application/json"})


def test_the_document_that_is_walked_is_the_one_that_is_served(client: httpx.Client) -> None:
    assert client.get("/openapi.json").json() == json.loads(json.dumps(DOCUMENT))


@each_place([place for place in PLACES if place.name != "previous_response_id"])  # none is kept
def test_the_body_of_each_place_is_accepted(client: httpx.Client, place: Place) -> None:
    """Else what is wrong at the place would be refused for something else, and show nothing."""
    response = send(client, place, place.body)
    assert response.status_code == 200, response.text[:300]


@each_place(PLACES)
@pytest.mark.usefixtures("neighbour")
def test_a_bad_value_is_refused_by_name(client: httpx.Client, place: Place) -> None:
    for value in wrong_for(WALK, place):
        response = send(client, place, place.with_value(value))
        assert 400 <= response.status_code < 500, (value, response.text[:300])
        assert explains(error_of(response), place, value), (value, response.text[:300])
    for value in (*others_for(WALK, place), None):
        response = send(client, place, place.with_value(value))
        ran_out = place.name == "timeout_ms" and response.status_code == 504
        assert response.status_code in (200, 400, 404) or ran_out, (value, response.text[:300])
        assert '"type":"server_error"' not in response.text.replace(" ", ""), (value, response.text[-300:])
        if response.status_code == 400:
            assert explains(error_of(response), place, value), (value, response.text[:300])


@each_place([place for place in PLACES if place.is_of_map])
@pytest.mark.usefixtures("neighbour")
@pytest.mark.parametrize("key", KEYS, ids=lambda key: ascii(key)[1:9])
def test_a_bad_key_of_a_map(client: httpx.Client, place: Place, key: str) -> None:
    response = send(client, place, place.with_key(key))
    assert response.status_code < 500, response.text[:300]
    if response.status_code != 200:
        assert place.path[0] in error_of(response)["message"], response.text[:300]
