"""A SIF: its format, its files, its record, its signature, and what makes two of them differ."""
