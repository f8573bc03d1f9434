"""dray: one pinned image, hauled to every node, and training started in it."""

__version__ = "0.1.0"
