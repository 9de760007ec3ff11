"""KVCacheManager: one request's blocks, from admission to its end. Engine thread only."""

from __future__ import annotations

from collections.abc import Iterable

from engine.kv.blocks import BlockPool
from engine.kv.prefix import block_hash, root_hash
from engine.request import Request


class KVCacheManager:
    """Gives requests the blocks they need, and finds those that the cache has already.

    A block becomes findable when the step that computes it is *scheduled*, not when it has run: every layer writes
    the keys and values of the whole step before it attends, so a request admitted to the same step may share it (the
    `n` choices of one prompt compute it once). Should that request's row fail, `forget` hides its blocks from later
    ones; whoever shares them in the same step has the same tokens and so the same values, good or bad, as if alone.
    """

    def __init__(self, pool: BlockPool, *, block_size: int, prefix_caching: bool, secret: bytes) -> None:
        self.pool = pool
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._secret = secret
        # Kept free on admission while others run, so that their next blocks do not push the newcomer out again.
        self._reserve = pool.num_blocks // 100

    def admit(self, request: Request, *, others_running: bool) -> bool:
        """Give a waiting request blocks for all its known tokens, cached ones first; False if there is no room.

        On success `num_computed_tokens` counts the cached tokens. At least the last token is always left to compute,
        since its logits are wanted; of a prompt whose logprobs are wanted, all that are not scored yet.
        """
        cached = self._find_cached(request)
        num_new = self._blocks_for(request.num_tokens) - len(cached)
        num_revived = sum(self.pool.is_free(block_id) for block_id in cached)
        reserve = self._reserve if others_running else 0
        if num_new + num_revived + reserve > self.pool.num_free:
            return False
        self.pool.hold(cached)
        request.block_ids = cached + self.pool.take(num_new)
        request.num_registered_blocks = len(cached)
        request.num_computed_tokens = len(cached) * self.block_size
        return True

    def extend(self, request: Request, num_tokens: int) -> bool:
        """Have blocks for the request's first `num_tokens` tokens; False, and nothing changed, if there is no room."""
        missing = self._blocks_for(num_tokens) - len(request.block_ids)
        if missing > self.pool.num_free:
            return False
        if missing > 0:
            request.block_ids += self.pool.take(missing)
        return True

    def register(self, request: Request) -> None:
        """Make the request's computed full blocks findable."""
        if not self.prefix_caching:
            return
        num_full = request.num_computed_tokens // self.block_size
        if num_full == request.num_registered_blocks:
            return
        self._hash_blocks(request, num_full)
        for i in range(request.num_registered_blocks, num_full):
            self.pool.register(request.block_ids[i], request.block_hashes[i])
        request.num_registered_blocks = num_full

    def forget(self, request: Request) -> None:
        """Make the request's blocks unfindable: what was computed into them is not to be trusted."""
        for block_id in request.block_ids:
            self.pool.forget(block_id)

    def free(self, request: Request) -> None:
        """Give the request's blocks back; it has computed nothing then. Its prefix stays findable longest."""
        self.pool.release(reversed(request.block_ids))
        request.block_ids = []
        request.num_computed_tokens = 0

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Prove that the pool and the block tables of `requests` (all that hold blocks) agree."""
        self.pool.check_integrity(request.block_ids for request in requests)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _find_cached(self, request: Request) -> list[int]:
        if not self.prefix_caching:
            return []
        num_usable = request.num_reusable_tokens // self.block_size
        found: list[int] = []
        for i in range(num_usable):
            self._hash_blocks(request, i + 1)
            block_id = self.pool.find(request.block_hashes[i])
            if block_id is None:
                break
            found.append(block_id)
        return found

    def _hash_blocks(self, request: Request, count: int) -> None:
        """Have the hashes of the first `count` blocks. Known tokens never change, so each is computed once."""
        hashes, size = request.block_hashes, self.block_size
        while len(hashes) < count:
            parent = hashes[-1] if hashes else root_hash(self._secret, cache_salt=request.cache_salt)
            start = len(hashes) * size
            hashes.append(block_hash(parent, request.token_ids[start : start + size]))
