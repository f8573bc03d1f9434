"""Clusters that dray reaches by the user's own ssh: names, connection, and what is copied there."""
