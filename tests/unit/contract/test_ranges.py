"""Host names in Slurm's short form, which a message about thousands of nodes has."""

from __future__ import annotations

import pytest

from dray.contract.ranges import compress_hosts
from dray.hostlist import expand


@pytest.mark.parametrize(
    ("names", "short"),
    [
        ([], ""),
        (["login"], "login"),
        (["n1"], "n1"),
        (["n1", "n2", "n3", "n7"], "n[1-3,7]"),
        (["n3", "n1", "n1", "n2"], "n[1-3]"),
        (["n08", "n09", "n10"], "n[08-09],n10"),
        (["n007", "n008", "n7"], "n[007-008],n7"),
        (["n0", "n00"], "n0,n00"),
        (["r1n1", "r1n2", "r2n1"], "r1n[1-2],r2n1"),
        (["n1-ib", "n2-ib", "login"], "n[1-2]-ib,login"),
        (["n" + "9" * 30], "n" + "9" * 30),
    ],
)
def test_the_short_form(names: list[str], short: str) -> None:
    assert compress_hosts(names) == short
    assert sorted(expand(short) if short else []) == sorted(set(names))


def test_every_other_of_ten_thousand() -> None:
    names = [f"nid{number:06}" for number in range(1, 10_001, 2)]
    assert expand(compress_hosts(names)) == names
