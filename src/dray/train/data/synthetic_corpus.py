"""The built-in corpus: a small made-up language. The same bytes every time, on every Python."""

from __future__ import annotations

import random
from collections.abc import Iterator

# Who acts decides how: a model has to look back over the sentence to know the last words.
_ACTORS = {
    "the crane": ("lifts", "with a steel hook"),
    "the driver": ("hauls", "over the bridge"),
    "the clerk": ("counts", "in a blue book"),
    "the tug": ("pulls", "against the tide"),
    "the guard": ("watches", "through the night"),
}
_COLOURS = ("red", "green", "grey", "white", "black")
_CARGO = ("box", "crate", "barrel", "bundle", "coil")
_NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_DOCUMENTS, _SENTENCES = 600, 6


def documents(seed: int = 1) -> Iterator[str]:
    """Short stories, one a document. Numbers count up, so part of each line follows from the one before."""
    rng = random.Random(seed)  # noqa: S311  a corpus, not a secret

    def pick(choices: tuple[str, ...]) -> str:
        return choices[int(rng.random() * len(choices))]  # choice() differs between versions of Python

    for _ in range(_DOCUMENTS):
        first = int(rng.random() * (len(_NUMBERS) - _SENTENCES + 1))
        sentences = []
        for number in _NUMBERS[first : first + _SENTENCES]:
            actor = pick(tuple(_ACTORS))
            verb, how = _ACTORS[actor]
            sentences.append(f"{number}: {actor} {verb} the {pick(_COLOURS)} {pick(_CARGO)} {how}.")
        yield " ".join(sentences)
