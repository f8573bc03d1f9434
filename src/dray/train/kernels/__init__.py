"""What a model computes other than transformers does."""
