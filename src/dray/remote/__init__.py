"""Clusters that are reached by the user's own ssh: names, connection, what is brought there."""
