"""Trains a causal language model as plan.json says. In the image; the only room besides checks that imports torch."""
