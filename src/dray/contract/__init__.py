"""What every room may import: exit codes, findings, core lists, atomic writes, the names in a run folder.

Standard library only, and little of it: the runner on each node and the supervisor of each rank pay for each import.
"""
