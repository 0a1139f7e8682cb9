"""Decoders built from a ModelSpec, and what the configuration says beyond it."""
