"""HTTPS over real sockets: who is answered, and by whom clients know that it is us."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx
import pytest
import uvicorn
from openai import AsyncOpenAI

from config.schema import AccessConfig, ServerConfig
from server.connections import connection_class
from server.daemon import _loop_factory
from server.tls import tls_options
from tests.factories_engine import FakeEngine
from tests.factories_http import make_app
from tests.factories_tls import make_certificates, trusting

pytestmark = pytest.mark.anyio

SOON_S = 10.0


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("tls"))


def config_of(files: Path, **more: str) -> uvicorn.Config:
    """A server's, with the options that the settings make."""
    access = AccessConfig(
        ssl_certfile=str(files / "cert.pem"),
        ssl_keyfile=str(files / "locked.pem"),
        ssl_keyfile_password="secret",
        **{name: str(files / file) for name, file in more.items()},
    )
    return uvicorn.Config(
        make_app(FakeEngine()), http=connection_class(ServerConfig()), log_config=None, **tls_options(access)
    )


@pytest.fixture
async def serve(files: Path) -> AsyncIterator[Callable[..., Awaitable[str]]]:
    """Starts a server; gives its address."""
    running: list[tuple[uvicorn.Server, asyncio.Task[None]]] = []

    async def start(**access: str) -> str:
        sock = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(config_of(files, **access))
        running.append((server, asyncio.create_task(server.serve([sock]))))
        return f"127.0.0.1:{sock.getsockname()[1]}"

    yield start
    for server, task in running:
        server.should_exit = True
        await task


def client(context: ssl.SSLContext | bool) -> httpx.AsyncClient:
    return httpx.AsyncClient(verify=context, trust_env=False, timeout=SOON_S)


async def test_the_openai_sdk_in_full_and_as_a_stream(serve: Callable[..., Awaitable[str]], files: Path) -> None:
    address = await serve()
    async with client(trusting(files)) as http:
        sdk = AsyncOpenAI(base_url=f"https://{address}/v1", api_key="unused", http_client=http, max_retries=0)
        full = await sdk.completions.create(model="fake/model", prompt="hi", max_tokens=8)
        stream = await sdk.completions.create(model="fake/model", prompt="hi", max_tokens=8, stream=True)
        pieces = [chunk.choices[0].text async for chunk in stream]
    assert "".join(pieces) == full.choices[0].text != ""


async def test_who_does_not_trust_its_authority_does_not_ask(serve: Callable[..., Awaitable[str]]) -> None:
    address = await serve()
    async with client(True) as http:
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            await http.get(f"https://{address}/v1/models")


async def test_it_is_asked_by_https_only(serve: Callable[..., Awaitable[str]]) -> None:
    address = await serve()
    async with client(True) as http:
        with pytest.raises(httpx.RemoteProtocolError):
            await http.get(f"http://{address}/health")


def test_old_versions_are_not_spoken(files: Path) -> None:
    config = config_of(files)
    config.load()
    assert config.ssl is not None
    assert config.ssl.minimum_version >= ssl.TLSVersion.TLSv1_2


@pytest.mark.parametrize(("shown", "is_answered"), [("client", True), ("stranger", False), (None, False)])
async def test_clients_with_certificates_only(
    serve: Callable[..., Awaitable[str]], files: Path, shown: str | None, is_answered: bool
) -> None:
    address = await serve(ssl_ca_certs="ca.pem")
    async with client(trusting(files, shown)) as http:
        asked = http.get(f"https://{address}/v1/models")
        if is_answered:
            assert (await asked).status_code == 200
        else:
            with pytest.raises(httpx.TransportError):
                await asked


def test_a_handshake_that_does_not_come_is_not_waited_for(files: Path) -> None:
    async def hold() -> bytes:
        sock = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(config_of(files))
        task = asyncio.create_task(server.serve([sock]))
        reader, writer = await asyncio.open_connection(*sock.getsockname())
        async with asyncio.timeout(SOON_S):
            told = await reader.read()
        writer.close()
        server.should_exit = True
        await task
        return told

    with asyncio.Runner(loop_factory=_loop_factory(0.1)) as runner:
        assert runner.run(hold()) == b""
