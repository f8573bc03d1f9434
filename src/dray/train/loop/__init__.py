"""The steps of a run, and what they measure."""
