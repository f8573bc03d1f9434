"""Host lists compared with scontrol's output and with ClusterShell, and the messages of malformed ones."""

from __future__ import annotations

from time import process_time

import pytest
from ClusterShell.NodeSet import NodeSet
from hypothesis import given, settings
from hypothesis import strategies as st

from dray.contract import exit_codes
from dray.contract.findings import ConfigError
from dray.hostlist import LIMIT, expand

pytestmark = pytest.mark.hostile("host lists")

# What `scontrol show hostnames` of Slurm 24.11.5 prints.
SCONTROL = {
    "n1": "n1",
    "n[7]": "n7",
    "n[07-10]": "n07 n08 n09 n10",
    "n[7-010]": "n7 n8 n9 n10",
    "n[08-9]": "n08 n09",
    "n[000]": "n000",
    "n[01,1]": "n01 n1",
    "n[3,1,2,1]": "n3 n1 n2 n1",
    "n[1-3,2-4]": "n1 n2 n3 n2 n3 n4",
    "b,a,b": "b a b",
    "n1,n[1-2],n1": "n1 n1 n2 n1",
    "[1-3]n": "1n 2n 3n",
    "n[1-2][3-4]": "n13 n14 n23 n24",
    "n[1-2]m[03]": "n1m03 n2m03",
    "a.b[1-2].c": "a.b1.c a.b2.c",
    "n-[1-2]": "n-1 n-2",
    "n[000000000000000001-3]": "n000000000000000001 n000000000000000002 n000000000000000003",
    "n[1-3,07-10]-ib[0-1],login1": (
        "n1-ib0 n1-ib1 n2-ib0 n2-ib1 n3-ib0 n3-ib1 "
        "n07-ib0 n07-ib1 n08-ib0 n08-ib1 n09-ib0 n09-ib1 n10-ib0 n10-ib1 login1"
    ),
    "n[1,3-4]x[2,1]y[5,07]": (
        "n1x2y5 n1x2y07 n3x2y5 n3x2y07 n4x2y5 n4x2y07 n1x1y5 n1x1y07 n3x1y5 n3x1y07 n4x1y5 n4x1y07"
    ),
    "n[1-2]x[1-2]y[1-2]z[1-2]w": (
        "n1x1y1z1w n1x1y1z2w n2x1y1z1w n2x1y1z2w n1x2y1z1w n1x2y1z2w n2x2y1z1w n2x2y1z2w "
        "n1x1y2z1w n1x1y2z2w n2x1y2z1w n2x1y2z2w n1x2y2z1w n1x2y2z2w n2x2y2z1w n2x2y2z2w"
    ),
    " n1 , n2 ": "n1 n2",
    "n1\nn2\tn3 n[4-5]\n": "n1 n2 n3 n4 n5",
}


@pytest.mark.parametrize(("text", "printed"), SCONTROL.items())
def test_expand_prints_what_scontrol_prints(text: str, printed: str) -> None:
    assert expand(text) == printed.split()


LETTERS = st.text("abn-.", min_size=1, max_size=4)


@st.composite
def ranges(draw: st.DrawFn) -> str:
    """Bounds of one width where padded, since ClusterShell refuses 08-9 and 7-010, which Slurm takes."""
    parts = []
    for _ in range(draw(st.integers(1, 3))):
        low = draw(st.integers(0, 1200))
        high = low + draw(st.integers(0, 12))
        width = draw(st.sampled_from([0, len(str(high)), len(str(high)) + 1]))
        parts.append(f"{low:0{width}}" if draw(st.booleans()) else f"{low:0{width}}-{high:0{width}}")
    return f"[{','.join(parts)}]"


@st.composite
def host_lists(draw: st.DrawFn) -> str:
    parts = st.lists(st.tuples(LETTERS, ranges()).map("".join), min_size=1, max_size=3).map("".join)
    tail = st.one_of(st.just(""), LETTERS)
    return ",".join(draw(st.lists(st.one_of(LETTERS, st.tuples(parts, tail).map("".join)), min_size=1, max_size=4)))


@pytest.mark.seconds
@settings(deadline=None)  # a shared machine stalls now and then
@given(host_lists())
def test_expand_names_the_hosts_that_clustershell_names(text: str) -> None:
    assert set(expand(text)) == set(NodeSet(text))


RANGES = "write ranges as [7] or [07-10,12]"
MISSING = "name one, or leave out the comma"
CLOSE = "close it with ] before the next one"
DIGIT = "check the range: a number may have a digit too many"


@pytest.mark.parametrize(
    ("text", "problem", "column", "fix"),
    [
        (",n", "a host is missing", 1, MISSING),
        ("n,,m", "a host is missing", 3, MISSING),
        ("n, ,m", "a host is missing", 4, MISSING),
        ("n,", "a host is missing", 3, MISSING),
        ("n[1-2", "this bracket is not closed", 2, CLOSE),
        ("n[[1-2]]", "this bracket is not closed", 2, CLOSE),
        ("n[1-2],m[1,n[3]", "this bracket is not closed", 9, CLOSE),
        ("n1-2]", "this bracket was not opened", 5, "open it with ["),
        ("n[1-2]]", "this bracket was not opened", 7, "open it with ["),
        ("n[]", "a range is missing", 3, RANGES),
        ("n[1,]", "a range is missing", 5, RANGES),
        ("n[1,,2]", "a range is missing", 5, RANGES),
        ("a[1-2]bc[3,x]", "`x` is not a range", 12, RANGES),
        ("n[1-]", "`1-` is not a range", 3, RANGES),
        ("n[-2]", "`-2` is not a range", 3, RANGES),
        ("n[1-2-3]", "`1-2-3` is not a range", 3, RANGES),
        ("n[1, 2]", "` 2` is not a range", 5, RANGES),
        ("n[٣]", "`٣` is not a range", 3, RANGES),
        ("n[1000000000000000000]", "`1000000000000000000` is not a range", 3, RANGES),
        ("m,n[1,3-1]", "`3-1` runs backwards", 7, "write 1-3"),
        ("m,n[0-99999999]", "more than 65,536 hosts", 3, DIGIT),
        ("n[0-999999999999999999]x[0-999999999999999999]", "more than 65,536 hosts", 1, DIGIT),
        ("n[0-255]x[0-255],m", "more than 65,536 hosts", 18, DIGIT),
    ],
)
def test_a_malformed_list_is_refused(text: str, problem: str, column: int, fix: str) -> None:
    with pytest.raises(ConfigError) as refused:
        expand(text)
    assert refused.value.exit_code == exit_codes.CONFIG
    assert str(refused.value) == (
        f"malformed host list: {problem}\n"
        f"  where:  column {column}\n"
        f"  found:  {text}\n"
        f"          {' ' * (column - 1)}^\n"
        f"  fix:    {fix}"
    )


@pytest.mark.parametrize("text", ["", " \n"])
def test_an_empty_list_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        expand(text)
    assert str(refused.value) == (
        "malformed host list: a host is missing\n"
        f"  where:  column {len(text) + 1}\n"
        "  found:  nothing\n"
        f"  fix:    {MISSING}"
    )


def test_only_the_neighbourhood_of_a_long_list_is_shown() -> None:
    with pytest.raises(ConfigError) as refused:
        expand("n1\n" * 100 + "n[" + ",2" * 100 + "]")
    assert refused.value.details["where"] == "column 303"
    assert refused.value.details["found"] == f"{'n1 ' * 16}n[{',2' * 25}\n{'^':>51}"


def test_the_limit_itself_is_allowed() -> None:
    assert len(expand(f"n[1-{LIMIT}]")) == LIMIT


@pytest.mark.parametrize("text", ["n[00001-10000]", "r[001-100]n[1-100]", ",".join(f"n{i}" for i in range(10_000))])
def test_ten_thousand_hosts_take_little_more_than_to_write_their_names(text: str) -> None:
    """CPU time, and the best of several: the code is measured, not the other work of the machine, nor how fast it is.

    20 ms where the plain loop takes 1.7.
    """
    best = {"expand": float("inf"), "plain": float("inf")}
    for _ in range(20):
        for name, make in (("expand", lambda: expand(text)), ("plain", lambda: [f"n{i:05}" for i in range(10_000)])):
            start = process_time()
            hosts = make()
            best[name] = min(best[name], process_time() - start)
            assert len(hosts) == 10_000
    assert best["expand"] < 12 * best["plain"]
