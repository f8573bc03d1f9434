"""The network: one that exists or a new one, with low-rank adapters, analog layers, attention and dropout of ours."""
