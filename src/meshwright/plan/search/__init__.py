"""The search over arrays: every layout of a space as a row of columns, judged and costed at once (needs numpy)."""
