"""Which of the plan's variables a container has before the runner starts; the runner sets all others."""

from __future__ import annotations

_NAMES = ("PATH", "PREPEND_PATH", "APPEND_PATH")
"""The engine looks for python3 in PATH; Apptainer makes it of all three."""
_PREFIXES = ("PYTHON", "LD_", "NVIDIA_")
"""The runner's own Python reads PYTHONPATH when it starts. Apptainer adds the host's libraries to LD_LIBRARY_PATH, and
NVIDIA's hooks read their own variables."""


def is_early(name: str) -> bool:
    """Whether the variable has an effect before the runner starts."""
    return name in _NAMES or name.startswith(_PREFIXES)
