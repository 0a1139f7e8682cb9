"""The OpenAI-compatible HTTP interface of the engine."""
