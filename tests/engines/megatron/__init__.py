"""Megatron-core."""
