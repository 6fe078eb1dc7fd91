"""Whether ways to compute the same rows with numerics="invariant" give the same bits on this GPU,
by many processes, compiling included: PYTHONPATH=src:tools python -m same_bits COMMAND

    kernels --kinds ...      what the pairs launch, without a GPU; with --jobs it is compiled
    pairs --kinds ...        compiles and compares; prints what differs, and how far it is meanwhile
    digests OUT              digests of results of a fixed set of calls, of these sources
    compare GOOD OTHER       how many of them are of other bits
    plant FAULT FOLDER       a copy of these sources with a fault, to run digests in

A kind is head dims, a dtype and options; "fast" pairs have no such numerics, and differ in part.
Ways, draws and what is equal are those of `support.problems.ways`.
"""
