"""Runs: their folders, how they are started, and how they ended."""
