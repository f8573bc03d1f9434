"""What the host and dray's trainer in the image must read alike: datasets, nodes that share a model, and tasks."""
