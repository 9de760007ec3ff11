"""A short soak: see `soak`, which has the figures of a long one."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.model import save_served_model
from tests.chaos.soak import SETTINGS, grown, soak
from tests.e2e.process import running

NOISE_BYTES = 8 * 2**20
"""What allocators and caches of bounded size may yet take after the first fifth."""


def test_nothing_grows(tmp_path: Path) -> None:
    model = save_served_model(tmp_path / "model")
    with running(tmp_path / "log", *SETTINGS, "--model", str(model)) as daemon:
        rss_bytes, num_fds, num_threads = grown(soak(daemon, 3000))
        assert daemon.log.count("Traceback") == 0
    assert rss_bytes < NOISE_BYTES
    assert num_fds <= 0
    assert num_threads <= 0
