"""Datasets: files or the hub -> documents -> tokens -> the rows of each step."""
