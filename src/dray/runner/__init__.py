"""The program that supervises a node's ranks, one on each node. Standard library only: it starts in milliseconds."""
