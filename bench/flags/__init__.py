"""Flag tables of engines, read from their own source as text: nothing of an engine is imported or run."""
