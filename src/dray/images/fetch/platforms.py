"""The platforms of wheels that an image may hold."""

from __future__ import annotations

# pip takes each platform at its word: manylinux_2_28 alone refuses a wheel for an older glibc.
PLATFORMS = (
    *(f"manylinux_2_{glibc}" for glibc in range(28, 4, -1)),
    *("manylinux2014", "manylinux2010", "manylinux1", "linux"),
)
