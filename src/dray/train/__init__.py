"""Train a language model as plan.json says: causal, masked or sft. Runs in the image; imports torch."""
