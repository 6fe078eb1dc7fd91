"""Machine code of covering arrays of problems, recorded and compared across checkouts.

    PYTHONPATH=src:tools python -m machine_code record base.json --checkout 9738b06 --array hopper
    PYTHONPATH=src:tools python -m machine_code record head.json --array hopper
    PYTHONPATH=src:tools python -m machine_code compare base.json head.json

An array is a small set of problems in which each pair of feature values, and each row of the config
table, is met. `record` compiles its kernels with a checkout's own sources, in a process of its own,
and keeps of each kernel a digest of its code, counts of its instructions and what it takes of the
chip. A kernel's name is its problem and its place among the problem's launches, so that kernels,
modules, parameters and config fields may be moved and renamed between two records, and arrays may
gain rows.

A record that is not .json is text, a line a kernel, to be kept and compared later: it has digests,
registers, spills, bytes and the number of instructions, but not how often each opcode occurs.

    PYTHONPATH=src:tools python -m machine_code record base.txt --checkout 9738b06 \\
        --families backward,mla --target sm_90 --sample 8
    PYTHONPATH=src:tools python -m machine_code record head.json --families backward,mla --sample 8
    PYTHONPATH=src:tools python -m machine_code compare base.txt head.json

Problems that only one record has are not compared: a sample is compared with all or with another.
"""
