"""Machine code of covering arrays of problems, recorded and compared across checkouts.

    PYTHONPATH=src:tools python -m machine_code record base.json --checkout ../base --array hopper
    PYTHONPATH=src:tools python -m machine_code record head.json --array hopper
    PYTHONPATH=src:tools python -m machine_code compare base.json head.json

An array is a small set of problems in which each pair of feature values, and each row of the config
table, is met. `record` compiles its kernels with a checkout's own sources, in a process of its own,
and keeps of each kernel a digest of its code, counts of its instructions and what it takes of the
chip. A kernel's name is its problem and its place among the problem's launches, so that kernels,
parameters and config fields may be renamed between two records.
"""
