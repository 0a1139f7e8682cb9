"""Ways to start ranks: local processes, torchrun."""
