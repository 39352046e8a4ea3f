"""The page allocator alone: numbering, reference counts, prefix matching, eviction order."""

import subprocess
import sys

import pytest

from jetserve.cache.pages import PageAllocator, page_digest

SIZE = 4


def fill(allocator: PageAllocator, tokens: list[int]) -> list[int]:
    """Pages for `tokens`, held, with every full one registered."""
    shared = allocator.match_prefix(tokens)
    pages = allocator.allocate(allocator.pages_for(len(tokens)) - len(shared), shared)
    assert pages is not None
    for i in range(len(tokens) // SIZE):
        allocator.register(pages[i], tokens[i * SIZE : (i + 1) * SIZE], pages[i - 1] if i else None)
    return pages


def test_pages_are_numbered_from_one_and_handed_out_once():
    allocator = PageAllocator(5, SIZE)
    pages = allocator.allocate(5)
    assert pages == [1, 2, 3, 4, 5]
    assert (allocator.used, allocator.free, allocator.total) == (5, 0, 5)
    assert allocator.allocate(1) is None
    assert allocator.allocate(0) == []


def test_allocation_is_all_or_nothing():
    allocator = PageAllocator(3, SIZE)
    tokens = [1] * 8
    allocator.release(fill(allocator, tokens))
    shared = allocator.match_prefix([*tokens, 9])
    assert len(shared) == 2
    # Three pages are free, but two of them are the shared ones.
    assert allocator.allocate(2, shared) is None
    assert (allocator.free, allocator.hit_tokens) == (3, 0)
    assert allocator.allocate(1, shared) == [*shared, 3]
    assert (allocator.free, allocator.hit_tokens) == (0, 8)


@pytest.mark.parametrize(("length", "expected"), [(0, 0), (1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (40, 3)])
def test_match_leaves_the_last_token_to_compute(length: int, expected: int):
    allocator = PageAllocator(8, SIZE)
    fill(allocator, list(range(12)))
    assert len(allocator.match_prefix(list(range(length)))) == expected


def test_match_needs_the_same_tokens_from_the_start():
    allocator = PageAllocator(8, SIZE)
    pages = fill(allocator, [1, 1, 1, 1, 2, 2, 2, 2])
    assert allocator.match_prefix([1, 1, 1, 1, 2, 2, 2, 2, 9]) == pages
    assert allocator.match_prefix([1, 1, 1, 1, 2, 2, 2, 3, 9]) == pages[:1]
    assert allocator.match_prefix([2, 2, 2, 2, 9]) == []
    assert allocator.match_prefix([3, 3, 3, 3, 2, 2, 2, 2, 9]) == []


def test_holders_are_counted():
    allocator = PageAllocator(4, SIZE)
    tokens = [1, 2, 3, 4]
    first = fill(allocator, tokens)
    second = allocator.allocate(1, allocator.match_prefix([*tokens, 5]))
    assert second is not None
    assert allocator.references(first[0]) == 2
    allocator.release(first)
    assert (allocator.references(first[0]), allocator.used) == (1, 2)
    allocator.release(second)
    assert allocator.used == 0


def test_released_pages_are_found_again_until_evicted_least_recent_first():
    allocator = PageAllocator(4, SIZE)
    old, new = [1] * 8, [2] * 4
    old_pages, new_pages = fill(allocator, old), fill(allocator, new)
    allocator.release(old_pages)
    allocator.release(new_pages)
    assert allocator.match_prefix([*old, 0]) == old_pages
    # The page that never held anything goes first, then the tail of the older sequence, then its head.
    assert allocator.allocate(1) == [4]
    assert allocator.allocate(1) == [old_pages[1]]
    assert allocator.match_prefix([*old, 0]) == old_pages[:1]
    assert allocator.allocate(1) == [old_pages[0]]
    assert allocator.match_prefix([*old, 0]) == []
    assert allocator.match_prefix([*new, 0]) == new_pages


def test_pages_without_content_are_evicted_before_cached_ones():
    allocator = PageAllocator(2, SIZE)
    cached = fill(allocator, [1] * 4)
    partial = fill(allocator, [2])
    allocator.release(cached)
    allocator.release(partial)
    assert allocator.allocate(1) == partial


def test_duplicate_pages_keep_the_first_and_their_chain():
    allocator = PageAllocator(4, SIZE)
    tokens = [1] * 8
    first, second = allocator.allocate(2), allocator.allocate(2)
    assert first is not None
    assert second is not None
    for pages in (first, second):
        allocator.register(pages[0], tokens[:4], None)
        allocator.register(pages[1], tokens[4:], pages[0])
    assert allocator.match_prefix([*tokens, 1]) == first
    assert not allocator.is_registered(second[0])
    allocator.release(second)
    assert allocator.allocate(2) == second  # evicted first: the same content is found in the other pages
    assert allocator.match_prefix([*tokens, 1]) == first


def test_prefix_caching_off_registers_nothing():
    allocator = PageAllocator(4, SIZE, prefix_caching=False)
    pages = fill(allocator, [1] * 8)
    assert allocator.match_prefix([1] * 9) == []
    assert not any(allocator.is_registered(page) for page in pages)


def test_clear_forgets_content_and_refuses_while_pages_are_held():
    allocator = PageAllocator(4, SIZE)
    pages = fill(allocator, [1] * 8)
    with pytest.raises(RuntimeError, match="2 pages are held"):
        allocator.clear()
    allocator.release(pages)
    allocator.clear()
    assert allocator.match_prefix([1] * 9) == []
    assert allocator.allocate(4) is not None


def test_misuse_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        PageAllocator(0, SIZE)
    allocator = PageAllocator(4, SIZE)
    pages = allocator.allocate(2)
    assert pages is not None
    with pytest.raises(ValueError, match="only full pages"):
        allocator.register(pages[0], [1], None)
    with pytest.raises(ValueError, match="is free"):
        allocator.register(4, [1] * 4, None)
    with pytest.raises(ValueError, match="in order"):
        allocator.register(pages[1], [1] * 4, pages[0])
    allocator.register(pages[0], [1] * 4, None)
    with pytest.raises(ValueError, match="other tokens"):
        allocator.register(pages[0], [2] * 4, None)
    allocator.release(pages)
    with pytest.raises(ValueError, match="free already"):
        allocator.release(pages)


def test_digest_depends_on_parent_and_order():
    root = page_digest(b"", [1, 2])
    assert root == page_digest(b"", [1, 2])
    assert len({root, page_digest(b"", [2, 1]), page_digest(root, [1, 2]), page_digest(b"", [1, 2, 0])}) == 4


def test_importing_needs_no_jax():
    code = "import sys, jetserve.cache.pages, jetserve.engine.scheduler; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
