"""`chairlift serve`: load a model and answer requests."""

from __future__ import annotations

import json
import socket
from functools import partial
from typing import TYPE_CHECKING

from cyclopts import App

from config.load import Loaded, SettingsLoader
from config.schema import Settings
from server import __version__
from server.terminal import fail, say, show_progress, warn

if TYPE_CHECKING:
    from engine.client import AsyncEngine


_NO_KEYS_TO_TELL_APART = "--prefix-cache-per-key does nothing without API keys: all requests share the prefix cache"
_OPEN_TO_ALL = (
    "THIS SERVER IS OPEN: it listens to the network, and asks nobody for a key",
    "whoever reaches this address can use the model: set --api-key-file or CHAIRLIFT_API_KEY, or --host 127.0.0.1",
)


def register(app: App, loader: SettingsLoader) -> None:
    """Add the command."""
    app.command(loader.command(serve))


def serve(loaded: Loaded) -> int:
    """Load a model and serve it over HTTP, until SIGTERM or Ctrl-C."""
    from engine.errors import ConfigError
    from server import daemon
    from server.auth import load_keys
    from server.logs import configure_logging
    from server.tls import tls_options
    from server.tracing import open_tracing

    settings = loaded.settings
    configure_logging(settings.server.log_level, settings.server.log_format)
    warn(loaded.warnings)
    try:
        has_keys = bool(load_keys(settings.access))
        scheme = "https" if tls_options(settings.access) else "http"
        tracing = open_tracing(settings.server.otlp_traces_endpoint)
        sock = daemon.bind(settings.server.host, settings.server.port)
        warn(access_warnings(settings, has_keys=has_keys, is_loopback=_is_loopback(sock)))
        url = _url(sock, scheme)
        say(f"Chairlift {__version__} loads {settings.engine.model.model}; it will answer at {url}")
        on_ready = partial(_say_ready, url, has_keys=has_keys)
        return daemon.run(settings, sock, show_progress(), on_ready, tracing)
    except ConfigError as error:
        fail(str(error), setting=error.setting, hint=error.hint)
    except daemon.BindError as error:
        fail(str(error), hint=error.hint)


def access_warnings(settings: Settings, *, has_keys: bool, is_loopback: bool) -> list[str]:
    """What an operator should know of who reaches what. The key file, if there is one, can be read."""
    from server.auth import key_file_warnings

    warnings = key_file_warnings(settings.access)
    if not has_keys and not is_loopback:
        warnings += _OPEN_TO_ALL
    if not has_keys and settings.engine.cache.prefix_cache_per_key:
        warnings.append(_NO_KEYS_TO_TELL_APART)
    return warnings


def _say_ready(url: str, engine: AsyncEngine, *, has_keys: bool) -> None:
    say(banner(url, engine, has_keys=has_keys))


def banner(url: str, engine: AsyncEngine, *, has_keys: bool) -> str:
    """What is being served, and a command to try it with."""
    info = engine.info
    tokens = info.num_blocks * info.block_size
    kind = "" if info.kv_cache_dtype == info.dtype else f" in {info.kv_cache_dtype}"
    lines = [
        f"Ready: {info.name} at {url}",
        f"  model     {info.num_parameters / 1e6:,.1f} M parameters",
        f"  runs on   {info.device} in {info.dtype}, {info.kernels} kernels",
        f"  context   {info.max_model_len:,} tokens",
        f"  KV cache  {tokens:,} tokens{kind}, {tokens / info.max_model_len:.1f} requests of full length",
        "Try it:",
        *_example(url, info.name, chat=engine.tokenizer.has_chat_template, key=has_keys),
    ]
    return "\n".join(lines)


def _example(url: str, model: str, *, chat: bool, key: bool) -> list[str]:
    """A curl command, to paste."""
    question = "Why is the sky blue?"
    body = {"messages": [{"role": "user", "content": question}]} if chat else {"prompt": question, "max_tokens": 64}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    headers = ["Content-Type: application/json", *(["Authorization: Bearer $CHAIRLIFT_API_KEY"] if key else [])]
    return [
        f"  curl {url}{path} \\",
        *(f'    -H "{header}" \\' for header in headers),
        f"    -d '{json.dumps({'model': model, **body})}'",
    ]


def _url(sock: socket.socket, scheme: str) -> str:
    host, port = sock.getsockname()[:2]
    if host in ("0.0.0.0", "::"):  # noqa: S104 - shown as the address one can open
        host = "127.0.0.1"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _is_loopback(sock: socket.socket) -> bool:
    import ipaddress

    return ipaddress.ip_address(sock.getsockname()[0].partition("%")[0]).is_loopback
