"""Computations that replace those of transformers: head and loss."""
