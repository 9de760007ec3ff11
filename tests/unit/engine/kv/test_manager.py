import pytest

from engine.kv.manager import KVCacheManager
from engine.request import Request
from tests.factories import make_manager, make_request


def compute(kv: KVCacheManager, request: Request) -> None:
    """Stand in for a step that computes all known tokens."""
    request.num_computed_tokens = request.num_tokens
    kv.register(request)


@pytest.mark.parametrize(
    ("length", "hit"),
    [(1, 0), (4, 0), (5, 4), (7, 4), (8, 4), (9, 8), (12, 8), (13, 12)],
)
def test_a_repeated_prompt_hits_all_full_blocks_but_never_its_last_token(length: int, hit: int):
    kv = make_manager()
    first, second = make_request(range(length)), make_request(range(length), 1)
    assert kv.admit(first, others_running=False)
    assert first.num_computed_tokens == 0
    compute(kv, first)
    kv.free(first)
    assert kv.admit(second, others_running=False)
    assert second.num_computed_tokens == hit
    kv.check_integrity([second])


def test_a_hit_ends_at_the_first_block_that_differs():
    kv = make_manager()
    first = make_request([1] * 16)
    kv.admit(first, others_running=False)
    compute(kv, first)
    second = make_request([1] * 6 + [2] + [1] * 9, 1)
    kv.admit(second, others_running=True)
    assert second.num_computed_tokens == 4
    assert second.block_ids[0] == first.block_ids[0]
    assert not set(second.block_ids[1:]) & set(first.block_ids)


def test_salts_keep_equal_prompts_apart():
    kv = make_manager()
    first = make_request([1] * 9, cache_salt="a")
    kv.admit(first, others_running=False)
    compute(kv, first)
    for salt, hit in (("b", 0), ("", 0), ("a", 8)):
        request = make_request([1] * 9, 1, cache_salt=salt)
        kv.admit(request, others_running=True)
        assert request.num_computed_tokens == hit, salt
        kv.free(request)


def test_no_prefix_caching_finds_nothing():
    kv = make_manager(prefix_caching=False)
    first, second = make_request([1] * 9), make_request([1] * 9, 1)
    kv.admit(first, others_running=False)
    compute(kv, first)
    kv.admit(second, others_running=True)
    assert second.num_computed_tokens == 0


def test_admission_wants_room_for_the_whole_prompt_and_counts_revived_blocks():
    kv = make_manager(num_blocks=4)
    first = make_request([1] * 8)
    kv.admit(first, others_running=False)
    compute(kv, first)
    kv.free(first)
    # Block 0 is a hit, but it is a free one: using it leaves 3 for the 4 that are missing.
    second = make_request([1] * 4 + [2] * 13, 1)
    assert not kv.admit(second, others_running=False)
    assert kv.pool.num_free == 4
    third = make_request([1] * 4 + [2] * 12, 2)
    assert kv.admit(third, others_running=False)
    kv.check_integrity([third])


def test_admission_beside_others_leaves_a_reserve():
    kv = make_manager(num_blocks=100)
    assert not kv.admit(make_request([1] * 400), others_running=True)
    assert kv.admit(make_request([1] * 396), others_running=True)
    alone = make_manager(num_blocks=100)
    assert alone.admit(make_request([1] * 400), others_running=False)


def test_extend_takes_blocks_only_at_borders_and_changes_nothing_when_full():
    kv = make_manager(num_blocks=2)
    request = make_request([1] * 4)
    kv.admit(request, others_running=False)
    assert kv.extend(request, 5)
    assert len(request.block_ids) == 2
    assert kv.extend(request, 8)
    assert not kv.extend(request, 9)
    assert len(request.block_ids) == 2


def test_forgotten_blocks_are_not_found():
    kv = make_manager()
    first, second = make_request([1] * 9), make_request([1] * 9, 1)
    kv.admit(first, others_running=False)
    compute(kv, first)
    kv.forget(first)
    kv.admit(second, others_running=True)
    assert second.num_computed_tokens == 0


def test_a_prefix_outlives_the_tail_of_the_same_request():
    kv = make_manager(num_blocks=4)
    first = make_request([1] * 16)
    kv.admit(first, others_running=False)
    compute(kv, first)
    kv.free(first)
    other = make_request([2] * 8, 1)
    kv.admit(other, others_running=False)
    again = make_request([1] * 8 + [3], 2)
    found = kv.admit(again, others_running=True)
    assert not found  # 2 blocks found, but a third is missing
    kv.free(other)
    kv.admit(again, others_running=False)
    assert again.num_computed_tokens == 8
