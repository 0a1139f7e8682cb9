"""What the user states and what is true of it: model, tensors, placement, cluster, workload, layout, rules."""
