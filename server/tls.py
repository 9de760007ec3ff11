"""HTTPS: the settings as uvicorn takes them, tried before a model is loaded for nothing."""

from __future__ import annotations

import ssl
from typing import Any

from config.schema import AccessConfig
from engine.errors import ConfigError


def tls_options(config: AccessConfig) -> dict[str, Any]:
    """Arguments of `uvicorn.Config`; none of them without a certificate. Raises ConfigError for files that are not fit.

    TLS 1.2 is the oldest version that is spoken, as OpenSSL and Python have it.
    """
    if config.ssl_certfile is None:
        for setting in ("ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs"):
            if getattr(config, setting) is not None:
                raise ConfigError("it needs --ssl-certfile: without, there is no HTTPS", setting=setting)
        return {}
    _check_certificate(config)
    options: dict[str, Any] = {
        "ssl_certfile": config.ssl_certfile,
        "ssl_keyfile": config.ssl_keyfile,
        "ssl_keyfile_password": config.ssl_keyfile_password,
    }
    if config.ssl_ca_certs is not None:
        options |= {"ssl_ca_certs": config.ssl_ca_certs, "ssl_cert_reqs": ssl.CERT_REQUIRED}
    return options


def _check_certificate(config: AccessConfig) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    assert config.ssl_certfile is not None
    try:
        # Without a password OpenSSL would ask for one at the terminal, and a daemon would wait for ever.
        password = config.ssl_keyfile_password or ""
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, lambda: password)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        key = "" if config.ssl_keyfile is None else f" with the key {config.ssl_keyfile}"
        raise ConfigError(
            f"the certificate {config.ssl_certfile}{key} cannot be used: {error}",
            setting="ssl_certfile",
            hint="both in PEM form, and --ssl-keyfile-password if the key is encrypted",
        ) from error
    try:
        if config.ssl_ca_certs is not None:
            context.load_verify_locations(config.ssl_ca_certs)
    except OSError as error:
        message = f"the authorities in {config.ssl_ca_certs} cannot be read: {error}"
        raise ConfigError(message, setting="ssl_ca_certs") from error
