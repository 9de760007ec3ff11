from engine.kv.blocks import BlockPool


def test_hands_out_unnamed_blocks_first_then_the_least_recently_used():
    pool = BlockPool(4)
    assert pool.take(4) == [0, 1, 2, 3]
    pool.register(1, b"one")
    pool.register(2, b"two")
    pool.release([2])
    pool.release([1])
    pool.release([0])
    assert pool.take(3) == [0, 2, 1]
    assert pool.find(b"one") is None
    assert pool.find(b"two") is None
    pool.check_integrity([[0, 2, 1], [3]])


def test_a_free_named_block_can_be_held_again():
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.register(block, b"x")
    pool.release([block])
    assert pool.is_free(block)
    assert pool.find(b"x") == block
    pool.hold([block])
    assert not pool.is_free(block)
    assert pool.num_free == 1
    pool.hold([block])
    pool.release([block])
    assert pool.num_used == 1
    pool.check_integrity([[block]])


def test_the_first_of_two_twins_keeps_the_name():
    pool = BlockPool(2)
    first, second = pool.take(2)
    pool.register(first, b"same")
    pool.register(second, b"same")
    assert pool.find(b"same") == first
    pool.forget(second)
    assert pool.find(b"same") == first
    pool.forget(first)
    assert pool.find(b"same") is None
    pool.check_integrity([[first, second]])
