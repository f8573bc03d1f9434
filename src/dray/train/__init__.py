"""Trains a language model as plan.json says: causal, masked or sft. In the image; besides checks alone in importing torch."""
