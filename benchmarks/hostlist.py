"""Median time to expand 10,000 hosts, in milliseconds. Run: python benchmarks/hostlist.py"""

from statistics import median
from timeit import repeat

from dray.hostlist import expand

ONE_BY_ONE = ",".join(f"n{number}x" for number in range(10_000))

for text in ("n[00001-10000]", "rack[001-100]n[1-100]", ONE_BY_ONE):
    assert len(expand(text)) == 10_000
    took = median(repeat(lambda text=text: expand(text), number=1, repeat=51)) * 1000
    print(f"expand   {text[:24]:<24} {took:6.2f} ms")
