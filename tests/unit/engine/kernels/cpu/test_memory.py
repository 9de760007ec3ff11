import errno
import gc
import mmap
import weakref

import pytest
import torch

from engine.kernels.cpu import memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_zeros_that_begin_at_a_cache_line(dtype: torch.dtype) -> None:
    slabs = memory.Slabs()
    for numel in (1, 33, 1000, 3, 70_000):
        tensor = slabs.zeros(numel, dtype)
        assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == ((numel,), dtype, True)
        assert tensor.data_ptr() % memory.ALIGNMENT == 0
        assert not tensor.any()
        tensor.fill_(1)  # whoever overlaps with it sees this


def test_what_is_written_stays_when_more_is_taken() -> None:
    slabs = memory.Slabs()
    tensors = [slabs.zeros(997, torch.int8).fill_(i) for i in range(100)]
    assert all((tensor == i).all() for i, tensor in enumerate(tensors))


def test_small_ones_share_large_pages_and_large_ones_begin_with_one() -> None:
    slabs = memory.Slabs()
    small = [slabs.zeros(1000, torch.float32) for _ in range(50)]
    assert small[0].data_ptr() % memory.PAGE_BYTES == 0
    assert len({tensor.data_ptr() // memory.PAGE_BYTES for tensor in small}) == 1
    large = slabs.zeros(memory.SLAB_BYTES + 1, torch.int8)
    assert large.data_ptr() % memory.PAGE_BYTES == 0


def test_a_kernel_without_large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pages(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Pages)
    assert memory.Slabs().zeros(5, torch.float32).tolist() == [0.0] * 5


def test_a_slab_goes_with_its_last_tensor() -> None:
    slabs = memory.Slabs()
    first = slabs.zeros(10, torch.float32)
    base = weakref.ref(first.untyped_storage())
    second = slabs.zeros(memory.SLAB_BYTES, torch.int8)  # begins another slab
    second.fill_(1)
    before = _mapped_bytes()
    del first
    gc.collect()
    assert base() is None
    assert before - _mapped_bytes() >= memory.SLAB_BYTES


def _mapped_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[0]) * 4096
