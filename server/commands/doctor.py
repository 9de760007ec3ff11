"""`chairlift doctor`: is this machine ready to serve, and if not, what to do."""

from __future__ import annotations

import json as json_format
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from cyclopts import App

from config.load import Loaded, SettingsLoader
from config.schema import Settings
from server.terminal import print_table, warn

MIN_PYTHON = (3, 11)
MIN_TORCH = (2, 11)
MIN_TRANSFORMERS, MAX_TRANSFORMERS = (5, 17), (6, 0)
SCARCE_MEMORY = 2 * 2**30
SCARCE_DISK = 2**30
INSTRUCTION_SETS = ("amx_bf16", "amx_tile", "avx512_bf16", "avx512f", "avx2", "fma", "bf16", "i8mm", "asimd")
"""Names in /proc/cpuinfo, x86 and Arm, of what makes matrix products fast."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found."""

    check: str
    status: Literal["ok", "warn", "fail"]
    found: str
    advice: str = ""
    """What to do about it; empty when there is nothing to do."""


Check = Callable[[Settings], Iterator[Finding]]


def register(app: App, loader: SettingsLoader) -> None:
    """Add the command."""
    settings = {"host", "port", "device", "model", "cache_dir"}
    app.command(loader.command(doctor, only=settings))


def doctor(loaded: Loaded, *, json: bool = False) -> int:
    """Check whether this machine is ready to serve, and say what to do where it is not.

    The exit status is 1 if something would keep the server from working.

    Parameters
    ----------
    json
        Print JSON for programs.
    """
    warn(loaded.warnings)
    findings = [finding for check in CHECKS for finding in _run(check, loaded.settings)]
    if json:
        print(json_format.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        _print_table(findings)
    return 1 if any(finding.status == "fail" for finding in findings) else 0


def _run(check: Check, settings: Settings) -> Iterator[Finding]:
    try:
        yield from check(settings)
    except Exception as error:  # a doctor that dies of the illness helps nobody
        name = check.__name__.removeprefix("_check_").replace("_", " ")
        yield Finding(name, "fail", f"{type(error).__name__}: {error}", "install again: make clean, then make serve")


def _print_table(findings: list[Finding]) -> None:
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    styles = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    for finding in findings:
        text = finding.found + (f"\n[{styles[finding.status]}]-> {finding.advice}[/]" if finding.advice else "")
        table.add_row(f"[{styles[finding.status]}]{finding.status}[/]", finding.check, text)
    print_table(table)


def _check_python(_: Settings) -> Iterator[Finding]:
    found = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info < MIN_PYTHON:
        yield Finding("python", "fail", found, "Chairlift needs 3.11 or newer: make serve PYTHON=python3.12")
    else:
        yield Finding("python", "ok", found)


def _check_libraries(_: Settings) -> Iterator[Finding]:
    for name, lowest, limit in (
        ("torch", MIN_TORCH, None),
        ("transformers", MIN_TRANSFORMERS, MAX_TRANSFORMERS),
    ):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield Finding(name, "fail", "not installed", "run make serve, or pip install chairlift")
            continue
        number = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
        if number < lowest or (limit is not None and number >= limit):
            wanted = f">={'.'.join(map(str, lowest))}" + (f",<{limit[0]}" if limit else "")
            yield Finding(name, "fail", version, f'pip install "{name}{wanted}"')
        else:
            yield Finding(name, "ok", version)


def _check_device(settings: Settings) -> Iterator[Finding]:
    import torch

    asked = settings.engine.model.device
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            properties = torch.cuda.get_device_properties(index)
            found = f"cuda:{index} {properties.name}, {_size(free)} of {_size(total)} free"
            scarce = free < SCARCE_MEMORY
            advice = "end other programs on this GPU: nvidia-smi lists them" if scarce else ""
            yield Finding("device", "warn" if scarce else "ok", found, advice)
        return
    build = f"torch {torch.__version__} " + (
        f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for CPUs only"
    )
    if asked.startswith("cuda"):
        advice = (
            "check the driver with nvidia-smi" if torch.version.cuda else "install torch with CUDA: pip install torch"
        )
        yield Finding("device", "fail", f"{asked} is asked for, but there is no CUDA device ({build})", advice)
    elif any(Path("/dev").glob("nvidia[0-9]*")):
        advice = (
            "check the driver with nvidia-smi" if torch.version.cuda else "install torch with CUDA: pip install torch"
        )
        yield Finding("device", "warn", f"cpu; there is an NVIDIA GPU that torch cannot use ({build})", advice)
    else:
        yield Finding("device", "ok", f"cpu ({build})")


def _check_kernels(settings: Settings) -> Iterator[Finding]:
    import torch

    from engine.kernels.cpu.library import KernelsMissing, openmp_path, variants

    if settings.engine.model.device != "cpu" and torch.cuda.is_available():
        return
    try:
        fastest, openmp = (variants() or ("none that this processor has",))[0], openmp_path()
    except KernelsMissing as reason:
        advice = "install gcc, then make clean and make serve; the reference kernels take several times as long"
        yield Finding("kernels", "warn", f"reference only: {reason}", advice)
        return
    found = f"cpu: {fastest}, OpenMP of {openmp}"
    is_shared = Path(torch.__file__).parent in Path(openmp).parents
    yield Finding(
        "kernels",
        "ok" if is_shared else "warn",
        found,
        "" if is_shared else "threads of two OpenMP runtimes compete: use torch's own wheel",
    )


def _check_cpu(_: Settings) -> Iterator[Finding]:
    from engine.machine import usable_cores

    has = _cpu_flags()
    sets = [name for name in INSTRUCTION_SETS if name in has]
    yield Finding("cpu", "ok", f"{platform.machine()} with {', '.join(sets) or 'no known vector instructions'}")
    cores = usable_cores()
    found = f"{cores} of {os.cpu_count()} cores may be used"
    if cores == 1:
        yield Finding("threads", "warn", found, "streams stall while the one core computes: give it two")
    else:
        yield Finding("threads", "ok", found)


def _cpu_flags() -> set[str]:
    """The CPU's features by their names in /proc/cpuinfo; empty where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return {flag for line in lines if line.startswith(("flags", "Features")) for flag in line.partition(":")[2].split()}


def _check_memory(_: Settings) -> Iterator[Finding]:
    from engine.machine import available_memory

    free = available_memory()
    if free < SCARCE_MEMORY:
        yield Finding("memory", "warn", f"{_size(free)} free", "the default model wants 2 GiB: end other programs")
    else:
        yield Finding("memory", "ok", f"{_size(free)} free")


def _check_port(settings: Settings) -> Iterator[Finding]:
    from server.daemon import BindError, bind

    host, port = settings.server.host, settings.server.port
    try:
        bind(host, port).close()
    except BindError as error:
        yield Finding("port", "fail", str(error), error.hint)
    else:
        yield Finding("port", "ok", f"{port} on {host} is free" if port else "any free one")


def _check_model(settings: Settings) -> Iterator[Finding]:
    from engine.errors import ModelError
    from engine.model.resolve import PACKAGED_MODELS, cached_model, resolve_model

    model = settings.engine.model
    if Path(model.model).expanduser().is_dir():
        try:
            yield Finding("model", "ok", str(resolve_model(model.model)))
        except ModelError as error:
            yield Finding("model", "fail", str(error), error.hint or "give a directory with a model, see --model")
        return
    if model.model in PACKAGED_MODELS:
        path = cached_model(model.model, model.cache_dir)
        if path is not None:
            size = sum(file.stat().st_size for file in path.iterdir())
            yield Finding("model", "ok", f"{model.model} in {path}, {_size(size)}")
            return
        yield Finding("model", "warn", f"{model.model} is not here yet", "chairlift pull, or let serve fetch it")
    yield from _check_cache(model.cache_dir)


def _check_cache(cache_dir: str | None) -> Iterator[Finding]:
    """Whether a model could be put into the cache."""
    from engine.model.cache import DEFAULT_CACHE_DIR

    directory = Path(cache_dir or DEFAULT_CACHE_DIR).expanduser()
    existing = next(parent for parent in (directory.absolute(), *directory.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    found = f"{directory}, {_size(free)} free"
    if not os.access(existing, os.W_OK | os.X_OK):
        yield Finding("cache", "fail", f"{found}, not writable", "choose another directory with --cache-dir")
    elif free < SCARCE_DISK:
        yield Finding("cache", "warn", found, "the default model takes 1 GiB while it is unpacked")
    else:
        yield Finding("cache", "ok", found)


def _size(count: int) -> str:
    from engine.machine import format_bytes

    return format_bytes(count)


CHECKS: tuple[Check, ...] = (
    _check_python,
    _check_libraries,
    _check_device,
    _check_cpu,
    _check_kernels,
    _check_memory,
    _check_port,
    _check_model,
)
