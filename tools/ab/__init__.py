"""Two checkouts timed in turns on one device: how long the new one takes over the base.

    PYTHONPATH=tools python -m ab BASE NEW --tables forward,backward --rounds 20
    PYTHONPATH=tools python -m ab 9738b06 src --tables host --json-lines figures.jsonl
    PYTHONPATH=tools python -m ab src src --tables decode     # how far equal code differs

Each side is a process of its own, with its own sources first on the path. Both keep their operands
and their compiled kernels; a third process gives out turns, so that one of them at most is at work.
A round is four turns, A B B A, since whoever comes later finds a warmer device. A turn's figure is
the median of its calls. A round's ratio is the new side's time over the base's, the geometric mean
of both halves. A case has the median over the rounds and an interval of that median, by bootstrap.

BASE and NEW are each one of
    a folder   with `heedful/` or `src/heedful/` in it, such as another `git worktree`;
    an archive of such a folder (.tar, .tar.gz, .zip), which `git archive -o FILE COMMIT src` makes;
    a bundle   (.bundle), which `git bundle create FILE COMMIT` makes; its newest head is taken;
    a commit   of the repository that this file is in.

A machine that gets a copy of the working tree alone, without .git, gets the base as an archive in
`.ab/`, which git ignores:

    mkdir -p .ab && git archive -o .ab/base.tar.gz COMMIT src        # here
    PYTHONPATH=tools python -m ab .ab/base.tar.gz src --jobs 8       # there

Cases are those of `heedful.bench` of the new side, called by public functions alone: modules may
move between the two. On a GPU calls are timed by CUDA events, each with a cold L2; under JAX by how
long CUPTI says that kernels run; on a CPU, and where a call's time on the host is the case, by the
clock.
"""
