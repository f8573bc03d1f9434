"""Fetch what an image is made from: wheels, source archives, Debian's packages, the base."""
