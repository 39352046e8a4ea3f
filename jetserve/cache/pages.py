"""Which page of the KV cache holds what: allocation, reference counts and prefix sharing, on the host.

Owns page numbers only. Knows nothing of jax, of the arrays behind the pages, or of sequences and their order.

Pages are numbered 1..num_pages; page 0 belongs to the device, which sends padding's writes there, and is never handed
out. Invariants: a page is free exactly while nobody holds it; a page whose content is registered is full and is never
written again until it is evicted, so holders may share it; what is not registered has exactly one holder.
"""

import array
import collections
import hashlib
from collections.abc import Iterable, Sequence


def page_digest(parent: bytes, tokens: Iterable[int]) -> bytes:
    """The identity of a full page: BLAKE2b of the digest of the page before it (empty for the first) and its tokens.

    A page's keys and values depend on every token before it, hence the chain. The hash is cryptographic, so equal
    digests mean equal prefixes and no tokens need to be kept to verify a hit.
    """
    return hashlib.blake2b(parent + array.array("q", tokens).tobytes(), digest_size=32).digest()


class PageAllocator:
    """Hands out pages of `page_size` tokens, remembers what full ones hold, and evicts the least recently used.

    A released page keeps its content until the page is needed for something else, so a prompt seen before, or a
    sequence that was preempted, finds its pages again. With `prefix_caching` off, nothing is registered or matched.
    """

    def __init__(self, num_pages: int, page_size: int, prefix_caching: bool = True) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"found {num_pages} pages of {page_size} tokens; expected at least 1 of each")
        self.page_size = page_size
        self.prefix_caching = prefix_caching
        self.total = num_pages
        self.hit_tokens = 0
        """Tokens that were not computed because a shared page held them, those of preempted sequences included."""
        self._references = [0] * (num_pages + 1)
        # Free pages, the next to be evicted first: pages without reachable content, then by time of release.
        self._free: collections.OrderedDict[int, None] = collections.OrderedDict.fromkeys(range(1, num_pages + 1))
        # Two sequences may compute the same page at the same time: both pages know their digest (the pages after them
        # are chained to it), but only the first is found under it.
        self._digests: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}

    @property
    def free(self) -> int:
        """Pages that `allocate` can hand out, those with cached content included."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Pages that somebody holds."""
        return self.total - len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """How many pages `num_tokens` tokens take."""
        return -(-num_tokens // self.page_size)

    def references(self, page: int) -> int:
        """How many holders `page` has."""
        return self._references[page]

    def is_registered(self, page: int) -> bool:
        """Whether `match_prefix` can find `page`."""
        digest = self._digests.get(page)
        return digest is not None and self._page_of.get(digest) == page

    def match_prefix(self, tokens: Sequence[int]) -> list[int]:
        """The cached pages that hold the longest prefix of `tokens`, in order; possibly none.

        At most `(len(tokens) - 1) // page_size` of them: the last token is always left to compute, because its
        logits are wanted, and the page it is written to is never a shared one. The pages are not held yet: pass them to
        `allocate` before any other call.
        """
        pages: list[int] = []
        if not self.prefix_caching:
            return pages
        digest = b""
        for start in range(0, len(tokens) - self.page_size, self.page_size):
            digest = page_digest(digest, tokens[start : start + self.page_size])
            page = self._page_of.get(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def allocate(self, count: int, shared: Sequence[int] = ()) -> list[int] | None:
        """Take hold of the `shared` pages that `match_prefix` found and of `count` new ones: all of them, in order.

        Returns None, and changes nothing, when there are not enough free pages. New pages lose what they held.
        """
        cached = [page for page in shared if self._references[page] == 0]
        if count + len(cached) > len(self._free):
            return None
        for page in cached:
            del self._free[page]
        new = [self._evict() for _ in range(count)]
        pages = [*shared, *new]
        for page in pages:
            self._references[page] += 1
        self.hit_tokens += len(shared) * self.page_size
        return pages

    def register(self, page: int, tokens: Sequence[int], parent: int | None) -> None:
        """Offer a held page, full and computed, for sharing: it holds `tokens`, following the page `parent`.

        `parent` is None for the first page of a sequence, else a page that was registered before and is still held.
        Raises ValueError when the page is not full or not held, or the parent was never registered.
        """
        if not self.prefix_caching:
            return
        if len(tokens) != self.page_size:
            raise ValueError(f"page {page} has {len(tokens)} tokens; only full pages ({self.page_size}) are registered")
        if self._references[page] < 1:
            raise ValueError(f"page {page} is free; register a page while its sequence holds it")
        if parent is not None and parent not in self._digests:
            raise ValueError(f"page {parent} is not registered; register the pages of a sequence in order")
        digest = page_digest(b"" if parent is None else self._digests[parent], tokens)
        if self._digests.setdefault(page, digest) != digest:
            raise ValueError(f"page {page} is registered with other tokens; a registered page is never written again")
        self._page_of.setdefault(digest, page)

    def release(self, pages: Sequence[int]) -> None:
        """Let go of one hold on each of `pages`. Raises ValueError for a page that nobody holds.

        The last pages of a sequence become evictable before the first ones, which more prompts have in common.
        """
        for page in reversed(pages):
            if self._references[page] < 1:
                raise ValueError(f"page {page} is free already; release each hold once")
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free[page] = None
                if not self.is_registered(page):
                    self._free.move_to_end(page, last=False)

    def clear(self) -> None:
        """Forget all cached content, as when the arrays behind the pages were made anew.

        Raises RuntimeError while pages are held.
        """
        if self.used:
            raise RuntimeError(f"{self.used} pages are held; finish every sequence before clearing the prefix cache")
        self._digests.clear()
        self._page_of.clear()

    def _evict(self) -> int:
        """Take the page at the front of the free order, forgetting what it held."""
        page, _ = self._free.popitem(last=False)
        registered = self.is_registered(page)
        digest = self._digests.pop(page, None)
        if digest is not None and registered:
            del self._page_of[digest]
        return page
