"""A SIF: its format, files, record and signature."""
