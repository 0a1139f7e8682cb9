"""Readers of Hugging Face configurations: one file a family of architectures."""
