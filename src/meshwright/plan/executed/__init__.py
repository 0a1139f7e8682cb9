"""The optimizer step exactly as our own trainer executes it, rank by rank and micro-batch by micro-batch."""
