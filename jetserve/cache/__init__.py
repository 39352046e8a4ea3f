"""The KV cache: device pages and their host-side allocator."""
