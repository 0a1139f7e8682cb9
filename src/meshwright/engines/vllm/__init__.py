"""vLLM: profile, command."""
