"""Random host lists against the cluster's own scontrol."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from dray.hostlist import expand

if TYPE_CHECKING:
    from dray.cluster.local import LocalCluster

LISTS = 2000
BATCH = 500
MOST_HOSTS = 200
SHOW = 'for list; do scontrol show hostnames "$list" 2>&1 | tr "\\n" " "; echo; done'


def _range(dice: random.Random) -> str:
    low = dice.choice([dice.randrange(12), dice.randrange(1200)])
    first = f"{low:0{dice.randrange(6)}}"
    if dice.random() < 0.5:
        return first
    return f"{first}-{low + dice.randrange(6):0{dice.randrange(6)}}"


def _host(dice: random.Random) -> str:
    text = dice.choice(["", "n", "gpu-", "a.b", "x0", "07", "n-1-"])
    for _ in range(dice.choice([0, 1, 1, 1, 2, 2, 3, 4])):
        text += f"[{','.join(_range(dice) for _ in range(dice.randint(1, 3)))}]"
        text += dice.choice(["", "-ib", "x", "3", "r07"])
    return text or "login"


def _hosts(dice: random.Random) -> str:
    separators = [",", ",", ",", " ", "\n", " , "]
    text = _host(dice)
    for _ in range(dice.choice([0, 0, 1, 3])):
        text += dice.choice(separators) + _host(dice)
    return text


@pytest.mark.slow
@pytest.mark.cluster
def test_expand_names_what_scontrol_names_in_its_order(cluster: LocalCluster) -> None:
    dice = random.Random(1)
    lists: list[str] = []
    while len(lists) < LISTS:
        text = _hosts(dice)
        if len(expand(text)) <= MOST_HOSTS:
            lists.append(text)
    printed: list[list[str]] = []
    for first in range(0, LISTS, BATCH):
        code, out, err = cluster.exec(["bash", "-c", SHOW, "bash", *lists[first : first + BATCH]])
        assert (code, err) == (0, "")
        printed += [line.split() for line in out.splitlines()]
    assert dict(zip(lists, printed, strict=True)) == {text: expand(text) for text in lists}
