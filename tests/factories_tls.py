"""Certificates, made on the spot: of the server, of its clients, and of strangers."""

from __future__ import annotations

import ssl
from pathlib import Path

import trustme
from cryptography.hazmat.primitives import serialization


def make_certificates(folder: Path) -> Path:
    """Into `folder`, as PEM: `ca`, the authority of all but `stranger`; `cert` with `key`, the server's, for localhost
    and 127.0.0.1; `locked`, the same key encrypted with "secret"; `other`, another key; `client` and `stranger`, each a
    certificate with its key. Gives the folder."""
    authority, elsewhere = trustme.CA(), trustme.CA()
    own = authority.issue_cert("localhost", "127.0.0.1")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    own.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    own.private_key_pem.write_to_path(folder / "key.pem")
    key = serialization.load_pem_private_key(own.private_key_pem.bytes(), password=None)
    locked = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    (folder / "locked.pem").write_bytes(locked)
    authority.issue_cert("other").private_key_pem.write_to_path(folder / "other.pem")
    authority.issue_cert("client").private_key_and_cert_chain_pem.write_to_path(folder / "client.pem")
    elsewhere.issue_cert("client").private_key_and_cert_chain_pem.write_to_path(folder / "stranger.pem")
    return folder


def trusting(folder: Path, client: str | None = None) -> ssl.SSLContext:
    """What a client of that server goes by; `client`: the certificate that it shows."""
    context = ssl.create_default_context(cafile=folder / "ca.pem")
    if client is not None:
        context.load_cert_chain(folder / f"{client}.pem")
    return context
