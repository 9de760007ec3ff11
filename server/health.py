"""Whether a server on this machine is well: what the image's health check asks, every few seconds, and so in little
time. The standard library only, nothing of the settings:

    python -P -m server.health --port 8000 [--tls [--handshake]]

Status 0: /health says 200. 1: it says something else, or nobody answers.
"""

from __future__ import annotations

import argparse
import http.client
import socket
import ssl
import sys
from collections.abc import Sequence

_HOST = "127.0.0.1"
_TIMEOUT_S = 4.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask, and print the answer; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -P -m server.health", description="Is the server here well?")
    parser.add_argument("--port", type=int, default=8000, help="port on this machine (8000)")
    parser.add_argument("--tls", action="store_true", help="ask by HTTPS")
    parser.add_argument("--handshake", action="store_true", help="ask nothing: clients need certificates there")
    asked = parser.parse_args(arguments)
    context = _trusting() if asked.tls else None
    try:
        if context is not None and asked.handshake:
            return _shake_hands(asked.port, context)
        return _ask(asked.port, context)
    except (OSError, http.client.HTTPException) as error:
        print(error)
        return 1


def _ask(port: int, context: ssl.SSLContext | None) -> int:
    if context is None:
        connection = http.client.HTTPConnection(_HOST, port, timeout=_TIMEOUT_S)
    else:
        connection = http.client.HTTPSConnection(_HOST, port, timeout=_TIMEOUT_S, context=context)
    connection.request("GET", "/health")
    answer = connection.getresponse()
    print(answer.read().decode(errors="replace"))
    return 0 if answer.status == http.client.OK else 1


def _shake_hands(port: int, context: ssl.SSLContext) -> int:
    """No certificate that lies on this machine need be one of a client. The server answers before it looks at ours, so
    its event loop goes round; if its engine does not go on, its watchdog ends the process."""
    with socket.create_connection((_HOST, port), _TIMEOUT_S) as plain, context.wrap_socket(plain) as connection:
        print(f"it speaks {connection.version()}, to clients with certificates")
    return 0


def _trusting() -> ssl.SSLContext:
    """It is the server itself that is asked, over the loopback interface, and its certificate is for another name."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


if __name__ == "__main__":
    sys.exit(main())
