"""Memory and cores inside containers, of both cgroup versions; what is kept of freed memory."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from engine.machine import available_memory, format_bytes, usable_cores

GIB = 2**30
ROOT = Path(__file__).parents[3]


def write(root: Path, **files: object) -> None:
    root.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (root / name.replace("__", ".")).write_text(f"{content}\n")


@pytest.fixture
def plenty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of 64 GiB and 16 cores."""
    memory = psutil.virtual_memory()._replace(available=64 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)


def membership(tmp_path: Path, text: str) -> Path:
    (tmp_path / "cgroup").write_text(text)
    return tmp_path / "cgroup"


@pytest.mark.usefixtures("plenty")
class TestVersion2:
    def test_no_limit(self, tmp_path: Path) -> None:
        write(tmp_path / "fs", memory__max="max", memory__current=5 * GIB, cpu__max="max 100000")
        mine = membership(tmp_path, "0::/\n")
        assert available_memory(tmp_path / "fs", mine) == 64 * GIB
        assert usable_cores(tmp_path / "fs", mine) == 16

    def test_limits_of_the_group_and_those_above_it(self, tmp_path: Path) -> None:
        root = tmp_path / "fs"
        write(root / "a", memory__max=3 * GIB, memory__current=2 * GIB, memory__stat="anon 7\ninactive_file 1024")
        write(root / "a" / "b", memory__max=8 * GIB, memory__current=GIB, cpu__max="250000 100000")
        mine = membership(tmp_path, "0::/a/b\n")
        assert available_memory(root, mine) == GIB + 1024  # files that can be dropped are free
        assert usable_cores(root, mine) == 3

    def test_mounted_as_if_it_were_the_root(self, tmp_path: Path) -> None:
        write(tmp_path / "fs", memory__max=2 * GIB, memory__current=GIB, cpu__max="50000 100000")
        mine = membership(tmp_path, "0::/docker/0123\n")
        assert available_memory(tmp_path / "fs", mine) == GIB
        assert usable_cores(tmp_path / "fs", mine) == 1

    def test_over_the_limit(self, tmp_path: Path) -> None:
        write(tmp_path / "fs", memory__max=GIB, memory__current=2 * GIB)
        assert available_memory(tmp_path / "fs", membership(tmp_path, "0::/\n")) == 0


@pytest.mark.usefixtures("plenty")
def test_version_1(tmp_path: Path) -> None:
    root = tmp_path / "fs"
    write(
        root / "memory" / "box",
        memory__limit_in_bytes=4 * GIB,
        memory__usage_in_bytes=GIB,
        memory__stat="total_inactive_file 4096",
    )
    write(root / "cpu" / "box", cpu__cfs_quota_us=200000, cpu__cfs_period_us=100000)
    mine = membership(tmp_path, "4:memory:/box\n1:cpu:/box\n0::/\n")
    assert available_memory(root, mine) == 3 * GIB + 4096
    assert usable_cores(root, mine) == 2


@pytest.mark.usefixtures("plenty")
def test_version_1_without_limits(tmp_path: Path) -> None:
    root = tmp_path / "fs"
    write(root / "memory", memory__limit_in_bytes=2**63 - 4096, memory__usage_in_bytes=GIB)
    write(root / "cpu", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100000)
    mine = membership(tmp_path, "4:memory:/\n1:cpu,cpuacct:/\n")
    assert available_memory(root, mine) == 64 * GIB
    assert usable_cores(root, mine) == 16


@pytest.mark.usefixtures("plenty")
def test_no_groups_at_all(tmp_path: Path) -> None:
    assert available_memory(tmp_path, tmp_path / "absent") == 64 * GIB
    assert usable_cores(tmp_path, tmp_path / "absent") == 16


def test_this_machine() -> None:
    assert 0 < available_memory() <= psutil.virtual_memory().total
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 * GIB, "5.0 GiB"), (3 * 2**40, "3.0 TiB")],
)
def test_format_bytes(count: int, text: str) -> None:
    assert format_bytes(count) == text


COUNT_PAGES = """
import resource, sys
import numpy as np
from engine.machine import keep_freed_memory
keep_freed_memory() if sys.argv[1] == "kept" else None
def fetch():
    np.empty(10 * 2**20, dtype=np.float32).fill(1)
fetch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    fetch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc")
def test_freed_memory_is_taken_again_without_fetching_pages():
    def num_pages(how: str) -> int:
        command = [sys.executable, "-c", COUNT_PAGES, how]
        return int(subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout)

    assert num_pages("kept") < 10
    assert num_pages("as it is") > 100


@pytest.mark.parametrize(("said", "policy"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")])
def test_threads_sleep_unless_the_environment_says_otherwise_and_openmp_hears_of_it(
    said: dict[str, str], policy: str
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    shown = subprocess.run(
        [sys.executable, "-c", "import engine, torch"],
        env=environment | said | {"OMP_DISPLAY_ENV": "true"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    assert f"OMP_WAIT_POLICY = '{policy}'" in shown
