"""Load on a server and what its clients wait for. No torch."""
