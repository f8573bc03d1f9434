"""The network, loaded or new, with LoRA, analog layers, and dray's attention."""
