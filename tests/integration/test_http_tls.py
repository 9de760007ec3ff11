"""HTTPS over real sockets: who is answered, and by whom clients know that it is us."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from http.client import HTTPResponse
from pathlib import Path

import httpx
import pytest
import uvicorn
import uvloop
from openai import AsyncOpenAI

from config.schema import AccessConfig, ServerConfig
from server.connections import Connection, connection_class
from server.handshakes import loop_factory
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


LOOPS = pytest.mark.parametrize("base", [asyncio.SelectorEventLoop, uvloop.Loop], ids=["asyncio", "uvloop"])

Silent = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def run_against_server(
    files: Path,
    base: type[asyncio.AbstractEventLoop],
    meet: Callable[[tuple[str, int], type[Connection]], Awaitable[None]],
    *,
    handshake_timeout_s: float = 600.0,
    **settings: int,
) -> None:
    """A server on such a loop, as the daemon has it; `meet` gets its address, and the class of its connections."""

    async def main() -> None:
        config = config_of(files)
        config.http = protocol = connection_class(ServerConfig(**settings))
        sock = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve([sock]))
        try:
            async with asyncio.timeout(SOON_S):
                await meet(sock.getsockname(), protocol)
        finally:
            server.should_exit = True
            await task
        assert not protocol.shaking
        assert not protocol.waiting

    with asyncio.Runner(loop_factory=loop_factory(handshake_timeout_s, base)) as runner:
        runner.run(main())


async def is_answered(files: Path, address: tuple[str, int]) -> bool:
    async with client(trusting(files)) as http:
        response = await http.get(f"https://127.0.0.1:{address[1]}/v1/models")
    return response.status_code == 200


@LOOPS
def test_a_handshake_that_does_not_come_is_not_waited_for(files: Path, base: type[asyncio.AbstractEventLoop]) -> None:
    async def meet(address: tuple[str, int], _: object) -> None:
        reader, writer = await asyncio.open_connection(*address)
        assert await reader.read() == b""
        writer.close()

    run_against_server(files, base, meet, handshake_timeout_s=0.1)


@LOOPS
def test_handshakes_count_as_connections(files: Path, base: type[asyncio.AbstractEventLoop]) -> None:
    """Those that wait longest go, whatever they have said of it, and who speaks TLS gets in."""

    async def meet(address: tuple[str, int], protocol: type[Connection]) -> None:
        silent: list[Silent] = []
        for number in range(10):
            silent.append(await asyncio.open_connection(*address))
            if number % 2:
                silent[-1][1].write(b"\x16\x03\x01\x02\x00\x01")  # a client's hello, as far as it goes
            while len(protocol.shaking) < min(number + 1, 3):  # noqa: ASYNC110 - it is accepted in its own time
                await asyncio.sleep(0.001)
        for reader, _ in silent[:7]:
            assert await ended(reader)
        assert len(protocol.shaking) == 3
        assert await is_answered(files, address)
        assert await ended(silent[7][0])
        for number in (8, 9):
            assert not silent[number][0].at_eof()
        for _, writer in silent:
            writer.close()

    run_against_server(files, base, meet, max_connections=3)


async def ended(reader: asyncio.StreamReader) -> bool:
    try:
        return await reader.read() == b""
    except ConnectionResetError:
        return True


@LOOPS
@pytest.mark.parametrize("asks", [True, False])
def test_a_farewell_that_does_not_come_keeps_nobody_out(
    files: Path, base: type[asyncio.AbstractEventLoop], asks: bool
) -> None:
    """Clients that leave their end of TLS open, after an answer that was the last or none at all."""

    async def meet(address: tuple[str, int], protocol: type[Connection]) -> None:
        rude = [await asyncio.to_thread(shake_hands, files, address) for _ in range(3)]
        for client in rude if asks else ():
            await asyncio.to_thread(ask_once, client)
        for _ in range(4):
            assert await is_answered(files, address)
            assert len(protocol.waiting) <= 3
        for client in rude:
            client.close()

    run_against_server(files, base, meet, max_connections=3)


def shake_hands(files: Path, address: tuple[str, int]) -> ssl.SSLSocket:
    sock = socket.create_connection(address, timeout=SOON_S)
    return trusting(files).wrap_socket(sock, server_hostname="127.0.0.1")


def read_answer(client: ssl.SSLSocket) -> bytes:
    answer = HTTPResponse(client)
    answer.begin()
    assert answer.status == 200
    return answer.read()


def ask_once(client: ssl.SSLSocket) -> None:
    """Read the answer, and not the farewell after it."""
    client.sendall(b"GET /live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    read_answer(client)


@LOOPS
def test_with_no_file_descriptor_left_it_goes_on_when_there_is_one(
    files: Path,
    base: type[asyncio.AbstractEventLoop],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("server.handshakes._PAUSE_S", 0.01)
    failures = [OSError(errno.EMFILE, "Too many open files"), OSError(errno.ECONNABORTED, "it has gone")]

    class Poor(socket.socket):
        def accept(self) -> tuple[socket.socket, object]:
            if failures:
                raise failures.pop(0)
            return super().accept()

    monkeypatch.setattr(socket, "socket", Poor)

    async def meet(address: tuple[str, int], _: object) -> None:
        assert await is_answered(files, address)

    run_against_server(files, base, meet)
    assert not failures
    assert "no connection can be accepted for 0.01 s: Too many open files" in caplog.text


def test_who_is_being_answered_stays_and_one_more_is_not_even_shaken_hands_with(files: Path) -> None:
    async def meet(address: tuple[str, int], protocol: type[Connection]) -> None:
        async with client(trusting(files)) as http:
            url = f"https://127.0.0.1:{address[1]}/v1/models"
            slow = await asyncio.to_thread(shake_hands, files, address)
            await asyncio.to_thread(
                slow.sendall, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 16\r\n\r\n"
            )
            while protocol.waiting or protocol.shaking:  # noqa: ASYNC110 - until its head is read
                await asyncio.sleep(0.001)
            with pytest.raises(httpx.TransportError):
                await http.get(url)
            await asyncio.to_thread(slow.sendall, b'{"prompt": "hi"}')
            assert b"text_completion" in await asyncio.to_thread(read_answer, slow)
            assert (await http.get(url)).status_code == 200  # it waits now, and goes
            slow.close()

    run_against_server(files, uvloop.Loop, meet, max_connections=1)
