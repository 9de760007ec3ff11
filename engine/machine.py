"""What this machine, or the container around the process, lets it have: memory and cores. No torch here."""

from __future__ import annotations

import ctypes
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

CGROUP_ROOT = Path("/sys/fs/cgroup")
CGROUP_OF_PROCESS = Path("/proc/self/cgroup")

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h


def available_memory(root: Path = CGROUP_ROOT, membership: Path = CGROUP_OF_PROCESS) -> int:
    """Bytes of main memory that this process may still take without swapping or being killed."""
    free = int(psutil.virtual_memory().available)
    limits = [_memory_left(directory) for directory in _cgroup_directories("memory", root, membership)]
    return max(0, min([free, *(limit for limit in limits if limit is not None)]))


def usable_cores(root: Path = CGROUP_ROOT, membership: Path = CGROUP_OF_PROCESS) -> int:
    """Cores that this process may keep busy: its affinity, cut to the container's CPU quota."""
    affinity: Callable[[int], set[int]] | None = getattr(os, "sched_getaffinity", None)  # Linux only
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    quotas = [_cpu_quota(directory) for directory in _cgroup_directories("cpu", root, membership)]
    return max(1, min([cores, *(math.ceil(quota) for quota in quotas if quota is not None)]))


def let_idle_threads_sleep() -> None:
    """Have OpenMP's threads sleep when they have nothing to do, unless the environment says otherwise.

    By default they spin for milliseconds, on cores that the event loop or other processes could use. OpenMP asks once,
    when torch loads it: call it before. Within a step the CPU kernels have their own way to wait (`csrc/run.c`).
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def keep_freed_memory() -> None:
    """Have the C library keep large blocks that are freed, for the next step to take, where it can (glibc).

    Else it may return them to the system each time: 12 MB of fresh pages cost more than a softmax over them. For the
    whole process, and from now on: call it when what is needed only once has been freed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 2**30)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def format_bytes(count: float) -> str:
    """A size to read: `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _cgroup_directories(controller: str, root: Path, membership: Path) -> Iterator[Path]:
    """The directories whose limits hold for this process: its own group's and those above it.

    In a container they may be mounted as if the container were the root, so the root counts too. Version 2 has one
    tree for all controllers (`0::/path`), version 1 one for each (`4:memory:/path`).
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return  # not Linux
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top = root
        elif controller in controllers.split(","):
            top = root / controller
        else:
            continue
        own = top / path.lstrip("/")
        yield from (directory for directory in (own, *own.parents) if directory.is_relative_to(top))


def _memory_left(directory: Path) -> int | None:
    """Bytes up to a group's limit; None if it has none. Cached files that the kernel can drop count as free."""
    for limit_name, usage_name, cache_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, usage = _read_number(directory / limit_name), _read_number(directory / usage_name)
        if limit is not None and usage is not None:
            return int(limit - usage) + _read_statistic(directory / "memory.stat", cache_name)
    return None


def _cpu_quota(directory: Path) -> float | None:
    """Cores' worth of time that a group may use; None if it has no limit."""
    try:
        quota, period = (directory / "cpu.max").read_text().split()
    except (OSError, ValueError):
        old_quota = _read_number(directory / "cpu.cfs_quota_us")
        old_period = _read_number(directory / "cpu.cfs_period_us")
        return old_quota / old_period if old_quota is not None and old_period and old_quota > 0 else None
    return None if quota == "max" else float(quota) / float(period)


def _read_number(path: Path) -> float | None:
    try:
        return float(path.read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return None


def _read_statistic(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(name + " ")), 0)
