from engine.kv.prefix import block_hash, root_hash


def test_a_hash_depends_on_tokens_parent_salt_adapter_and_process():
    root = root_hash(b"secret")
    roots = [root, root_hash(b"other"), root_hash(b"secret", cache_salt="a"), root_hash(b"secret", adapter="a")]
    hashes = [block_hash(parent, tokens) for parent in roots for tokens in ([1, 2], [2, 1], [1, 2, 0], [258])]
    assert len(set(hashes)) == len(hashes)
    assert block_hash(root, [1, 2]) == block_hash(root, (1, 2))


def test_parts_of_the_root_do_not_run_into_one_another():
    assert root_hash(b"s", adapter="ab", cache_salt="c") != root_hash(b"s", adapter="a", cache_salt="bc")
