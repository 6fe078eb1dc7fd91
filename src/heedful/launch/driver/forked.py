"""The error in a forked child that launches on a GPU which its parent had used."""

FORKED = (
    "this process cannot use the GPU: it was forked from one that had already used it; to use a GPU"
    " in several processes, start them by multiprocessing's 'spawn' or 'forkserver' method"
)
