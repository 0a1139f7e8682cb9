"""Training speed beside what others run on the same machine."""
