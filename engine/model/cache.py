"""The cache of unpacked models: each directory in it is complete, however often its making was killed.

CACHE/models/NAME              a complete model; appears by one rename
CACHE/models/.NAME.lock        held by the process that makes it; the system lets go of it when that process dies
CACHE/models/.NAME.partial/    being made, or left by a process that was killed: removed by the next one
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.errors import ModelError
from engine.progress import Progress

DEFAULT_CACHE_DIR = Path("~/.cache/chairlift")


class ModelCache:
    """Unpacked models in `directory`, by default `~/.cache/chairlift`."""

    def __init__(self, directory: str | Path | None = None, progress: Progress | None = None) -> None:
        self._models = Path(directory or DEFAULT_CACHE_DIR).expanduser() / "models"
        self._progress = progress

    def path(self, name: str) -> Path:
        """Where the model `name` is, or will be."""
        return self._models / name

    def get(self, name: str, make: Callable[[Path, Path], None]) -> Path:
        """The directory of the model `name`; if it is not there yet, `make(target, scratch)` fills it first.

        Both arguments are empty directories on the same disk; `scratch` is thrown away. A second process that wants
        the same model waits for the first. A complete model is found without writing anything, so the cache may be
        read-only by then. Raises ModelError when the cache cannot be written.
        """
        target = self.path(name)
        if target.is_dir():
            return target
        try:
            self._models.mkdir(parents=True, exist_ok=True)
            with self._locked(name):
                if not target.is_dir():  # the process we waited for may have made it
                    self._make(name, make)
        except OSError as error:
            reason = error.strerror or str(error)
            hint = "choose another directory with --cache-dir, or make room"
            raise ModelError(f"cannot write {self._models}: {reason}", setting="cache_dir", hint=hint) from error
        return target

    def _make(self, name: str, make: Callable[[Path, Path], None]) -> None:
        partial = self._models / f".{name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        try:
            model, scratch = partial / "model", partial / "scratch"
            model.mkdir(parents=True)
            scratch.mkdir()
            make(model, scratch)
            _settle(model)
            model.rename(self.path(name))
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        from filelock import FileLock, Timeout

        lock = FileLock(self._models / f".{name}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            if self._progress is not None:
                self._progress("waiting for another process that makes this model ready")
            lock.acquire()
        try:
            yield
        finally:
            lock.release()


def _settle(directory: Path) -> None:
    """Make the files outlast a power cut, and as readable as the directory is (safetensors gives them mode 0600)."""
    mode = stat.S_IMODE(directory.stat().st_mode) & 0o666
    for path in directory.iterdir():
        path.chmod(mode)
        with path.open("rb") as file:
            os.fsync(file.fileno())
