"""Serving: the paged KV cache."""
