"""What the routes serve from: one engine, and what is made once for it."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as package_version

from config.schema import Settings
from engine.client import AsyncEngine
from server import __version__
from server.admission import Admission
from server.chat.dialect import Dialect
from server.convert import Converter
from server.ratelimits import RateLimits
from server.responses.background import BackgroundJobs
from server.responses.store import ResponseStore
from server.watchdog import Watchdog


@dataclass(frozen=True, slots=True)
class Serving:
    """What the routes serve from. Event loop only."""

    engine: AsyncEngine
    watchdog: Watchdog
    admission: Admission
    rate_limits: RateLimits
    root: str
    """The model as the operator named it."""
    converter: Converter
    fingerprint: str
    """Changes with whatever may change the text that a prompt and a seed give."""
    responses: ResponseStore
    """Finished answers of /v1/responses."""
    jobs: BackgroundJobs
    """Those that are being made while nobody waits."""
    torch_version: str
    transformers_version: str
    started_s: int = field(default_factory=lambda: int(time.time()))
    """Seconds since 1970."""
    log_prompts: bool = False
    prefix_cache_per_key: bool = False
    """What one API key has sent is not reused for another."""

    @classmethod
    def make(
        cls,
        settings: Settings,
        engine: AsyncEngine,
        watchdog: Watchdog,
        admission: Admission,
        rate_limits: RateLimits,
    ) -> Serving:
        """Serve `engine`, which has loaded and which `watchdog` looks at, `admission` and `rate_limits` guard."""
        root = settings.engine.model.model
        info = engine.info
        torch, transformers = _version("torch"), _version("transformers")
        parts = (
            __version__,
            root,
            settings.engine.model.revision,
            info.dtype,
            info.kv_cache_dtype,
            settings.engine.model.quantization,
            info.device,
            info.kernels,
            torch,
            transformers,
        )
        fingerprint = "fp_" + hashlib.sha256(repr(parts).encode()).hexdigest()[:10]
        dialect = Dialect.of(settings.server, engine.tokenizer)
        store = ResponseStore(settings.server.max_stored_responses, settings.server.stored_responses_memory)
        return cls(
            engine=engine,
            watchdog=watchdog,
            admission=admission,
            rate_limits=rate_limits,
            root=root,
            converter=Converter(
                engine,
                dialect,
                max_queue_wait_s=settings.server.max_queue_wait,
                request_timeout_s=settings.server.request_timeout,
            ),
            fingerprint=fingerprint,
            responses=store,
            jobs=BackgroundJobs(),
            torch_version=torch,
            transformers_version=transformers,
            log_prompts=settings.server.log_prompts,
            prefix_cache_per_key=settings.engine.cache.prefix_cache_per_key,
        )

    @property
    def model(self) -> str:
        """The model as clients name it."""
        return self.engine.info.name


def _version(package: str) -> str:
    try:
        return package_version(package)  # does not import it
    except PackageNotFoundError:
        return "unknown"
