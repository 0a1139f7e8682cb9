"""The user's unmodified script, run for every rank at once, each operation held until its peers post the same."""
