"""The server under load: beside vLLM, beside its own plan, and for an hour."""
