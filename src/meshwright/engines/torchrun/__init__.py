"""torchrun: launcher flags."""
