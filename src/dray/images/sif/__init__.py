"""A SIF: its format, files, record and signature, and how two SIFs differ."""
