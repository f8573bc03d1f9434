"""What a run needs, estimated before it starts: the memory of its model, its activations and its optimizer."""
