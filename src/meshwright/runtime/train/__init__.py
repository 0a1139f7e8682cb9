"""Training: model, optimizer, data, checkpoints, the loop."""
