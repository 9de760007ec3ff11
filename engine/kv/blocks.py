"""BlockPool: which KV blocks are free, who holds the others, and which can be found again by content.

Knows ids, reference counts and hashes. It does not know requests, tokens or tensors. Engine thread only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class BlockPool:
    """`num_blocks` block ids, 0 ... num_blocks - 1.

    A block that nobody holds is free. It keeps its hash, and can be found and held again, until `take` hands it out
    for new content. Free blocks are handed out in this order: those without a hash, then the least recently used.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks  # of registered blocks
        self._by_hash: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # next to be handed out first

    @property
    def num_free(self) -> int:
        """Blocks that `take` could hand out now."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - len(self._free)

    def take(self, count: int) -> list[int]:
        """Hand out `count` free blocks for new content, held once each. The caller has checked `num_free`."""
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block_id in taken:
            self.forget(block_id)
            self._ref_counts[block_id] = 1
        return taken

    def find(self, block_hash: bytes) -> int | None:
        """The block registered under this hash, held or free; None if there is none."""
        return self._by_hash.get(block_hash)

    def is_free(self, block_id: int) -> bool:
        """Whether nobody holds this block."""
        return self._ref_counts[block_id] == 0

    def hold(self, block_ids: Iterable[int]) -> None:
        """Hold found blocks once more, so that they are not handed out."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._free[block_id]
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Undo one `take` or `hold` of each. Blocks named first are reused first: name a request's last block first."""
        for block_id in block_ids:
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._free[block_id] = None
                if self._hashes[block_id] is None:
                    self._free.move_to_end(block_id, last=False)

    def register(self, block_id: int, block_hash: bytes) -> None:
        """Make a held block findable. The first block with some content keeps the name; a later twin stays unnamed."""
        if block_hash not in self._by_hash:
            self._by_hash[block_hash] = block_id
            self._hashes[block_id] = block_hash

    def forget(self, block_id: int) -> None:
        """Make a block unfindable, since its content is wrong or about to change."""
        block_hash = self._hashes[block_id]
        if block_hash is not None:
            del self._by_hash[block_hash]
            self._hashes[block_id] = None

    def check_integrity(self, held: Iterable[Iterable[int]] = ()) -> None:
        """Prove that free + used = all, and that reference counts are what the block tables in `held` say.

        Raises AssertionError. O(num_blocks): for tests and for idle times.
        """
        expected = [0] * self.num_blocks
        for table in held:
            for block_id in table:
                expected[block_id] += 1
        assert self._ref_counts == expected, "reference counts differ from the block tables"
        assert set(self._free) == {i for i, count in enumerate(expected) if count == 0}, "free list is wrong"
        named = {block_hash: i for i, block_hash in enumerate(self._hashes) if block_hash is not None}
        assert named == self._by_hash, "hash index is wrong"
