"""Whether a GGUF file is what its header says: before it is read by a library that takes the header's word for it.

Such a file is anybody's. One that claims an array of 2**61 numbers keeps the reader busy, and its memory growing, for
ever; others have made readers in C write where they must not. So all counts are held against the file's length here.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

from engine.errors import ModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Type of a value -> its length, of those that have one."""
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4
_LEAST_ENTRY_BYTES = 8
"""No name, value or description of a tensor is shorter."""


def check_header(path: Path) -> None:
    """Raises ModelError for a header that cannot be true, and OSError for a file that cannot be read.

    What it leaves to the reader: whether the names, and the types and shapes of the tensors, mean anything.
    """
    with path.open("rb") as stream:
        try:
            _Header(stream, path.stat().st_size).check()
        except _Unsound as error:
            hint = "is it complete? it may have been made to harm whoever reads it"
            raise ModelError(f"{path} is no sound GGUF file: {error}", setting="model", hint=hint) from error


class _Unsound(Exception):
    """What is wrong with it."""


class _Header:
    def __init__(self, stream: BinaryIO, num_bytes: int) -> None:
        self._stream = stream
        self._num_left = num_bytes
        self._order = "<"

    def check(self) -> None:
        if self._take(4) != _MAGIC:
            raise _Unsound("it does not begin as one")
        version = self._take(4)
        self._order = ">" if version[:2] == b"\0\0" else "<"  # no version is as large as one of the other order
        (number,) = struct.unpack(f"{self._order}I", version)
        if number not in _VERSIONS:
            raise _Unsound(f"its version is {number}")
        num_tensors, num_fields = self._count(_LEAST_ENTRY_BYTES), self._count(_LEAST_ENTRY_BYTES)
        for _ in range(num_fields):
            self._skip_string()
            self._skip_value(self._int("I"))
        for _ in range(num_tensors):
            self._check_tensor()

    def _check_tensor(self) -> None:
        self._skip_string()
        num_dimensions = self._int("I")
        if num_dimensions > _MAX_DIMENSIONS:
            raise _Unsound(f"a tensor has {num_dimensions} dimensions")
        self._take(8 * num_dimensions + 4)
        if (offset := self._int("Q")) > self._num_left:
            raise _Unsound(f"a tensor begins {offset} bytes on, and the file has {self._num_left} more")

    def _skip_value(self, kind: int) -> None:
        if kind == _STRING:
            self._skip_string()
        elif kind == _ARRAY:
            self._skip_array()
        elif kind in _SCALAR_BYTES:
            self._take(_SCALAR_BYTES[kind])
        else:
            raise _Unsound(f"a value has the type {kind}")

    def _skip_array(self) -> None:
        kind = self._int("I")
        if kind in _SCALAR_BYTES:
            self._skip(_SCALAR_BYTES[kind] * self._count(_SCALAR_BYTES[kind]))
        elif kind == _STRING:
            for _ in range(self._count(_LEAST_ENTRY_BYTES)):
                self._skip_string()
        else:
            raise _Unsound(f"an array is one of values of the type {kind}")

    def _skip_string(self) -> None:
        self._skip(self._count(1))

    def _count(self, least_bytes: int) -> int:
        """How many follow, each of `least_bytes` at least."""
        count = self._int("Q")
        if count * least_bytes > self._num_left:
            raise _Unsound(f"{count} of something follow, and the file has {self._num_left} bytes more")
        return count

    def _int(self, code: str) -> int:
        code = self._order + code
        number: int = struct.unpack(code, self._take(struct.calcsize(code)))[0]
        return number

    def _take(self, num_bytes: int) -> bytes:
        data = self._stream.read(num_bytes)
        self._num_left -= num_bytes
        if len(data) < num_bytes:
            raise _Unsound("it ends within its header")
        return data

    def _skip(self, num_bytes: int) -> None:
        """Of what is known to be there."""
        self._stream.seek(num_bytes, 1)
        self._num_left -= num_bytes
