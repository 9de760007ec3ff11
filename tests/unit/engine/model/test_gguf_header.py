"""GGUF files made to harm whoever reads them: refused by their header, before a reader takes its word for anything."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from gguf import GGUFReader

from engine.errors import ModelError
from engine.model.gguf import convert_gguf
from engine.model.gguf_header import check_header
from tests.unit.engine.model.gguf_files import write_gguf

UINT8, UINT32, STRING, ARRAY = 0, 4, 8, 9


def start(num_tensors: int, num_fields: int, version: int = 3, magic: bytes = b"GGUF", order: str = "<") -> bytes:
    return magic + struct.pack(f"{order}IQQ", version, num_tensors, num_fields)


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def field(kind: int, value: bytes) -> bytes:
    return start(0, 1) + string(b"a") + struct.pack("<I", kind) + value


def tensor(*shape: int, num_dimensions: int | None = None, offset: int = 0) -> bytes:
    count = len(shape) if num_dimensions is None else num_dimensions
    sizes = struct.pack(f"<{len(shape)}Q", *shape)
    return start(1, 0) + string(b"w") + struct.pack("<I", count) + sizes + struct.pack("<IQ", 0, offset)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "ends within its header"),
        (b"GGUF\3\0", "ends within its header"),
        (b"GGML" + bytes(100), "does not begin as one"),
        (start(0, 0, version=1), "its version is 1"),
        (start(0, 0, version=4), "its version is 4"),
        (start(0, 2**63), "9223372036854775808 of something follow"),
        (start(2**62, 0), "4611686018427387904 of something follow"),
        (start(0, 1) + struct.pack("<Q", 2**62) + b"a", "and the file has 1 bytes more"),
        (field(STRING, struct.pack("<Q", 2**64 - 1)), "of something follow"),
        (field(ARRAY, struct.pack("<IQ", UINT32, 2**61)), "2305843009213693952 of something follow"),
        (field(ARRAY, struct.pack("<IQ", UINT32, 2**62 + 1) + bytes(4)), "of something follow"),  # 4 bytes modulo 2**64
        (field(ARRAY, struct.pack("<IQ", STRING, 2**61)), "of something follow"),
        (field(ARRAY, struct.pack("<IQ", UINT8, 8) + bytes(7)), "8 of something follow, and the file has 7"),
        (field(ARRAY, struct.pack("<IQ", ARRAY, 1) * 100_000), "an array is one of values of the type 9"),
        (field(77, b""), "a value has the type 77"),
        (field(UINT32, b"\0\0\0"), "ends within its header"),
        (tensor(num_dimensions=2**32 - 1), "a tensor has 4294967295 dimensions"),
        (tensor(1, 1, num_dimensions=4), "ends within its header"),
        (tensor(1, offset=2**62), "begins 4611686018427387904 bytes on"),
    ],
)
def test_a_header_that_cannot_be_true(tmp_path: Path, data: bytes, says: str) -> None:
    path, target = tmp_path / "bad.gguf", tmp_path / "target"
    path.write_bytes(data)
    target.mkdir()
    with pytest.raises(ModelError, match="is no sound GGUF file") as caught:
        convert_gguf(path, target)
    assert says in str(caught.value)
    assert list(target.iterdir()) == []


@pytest.mark.parametrize("length", range(0, 2000, 37))
def test_cut_anywhere_it_is_refused_or_its_header_is_whole(tmp_path: Path, length: int) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    header_len = min(tensor.data_offset for tensor in GGUFReader(path).tensors)
    path.write_bytes(path.read_bytes()[:length])
    assert length < header_len
    with pytest.raises(ModelError):
        check_header(path)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("version", [2, 3])
def test_what_may_be_true_is_left_to_the_reader(tmp_path: Path, version: int, order: str) -> None:
    path = tmp_path / "whole.gguf"
    path.write_bytes(start(0, 0, version, order=order))
    check_header(path)
    write_gguf(path)
    check_header(path)
