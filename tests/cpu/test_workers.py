"""Threads of the CPU backend change nothing but the time a call takes."""

import contextlib
import multiprocessing
import threading

import pytest
import torch

from heedful import cpu
from heedful.cpu import scores
from heedful.cpu.workers import for_each
from support.cases import Case, build

CASE = Case(seqlen_q=600, seqlen_k=700, heads_q=8, heads_k=4, head_dim=16, causal=True, sink=True)


def everything(built):
    out, lse, _ = cpu.forward(built.problem, built.x)
    grads = cpu.backward(built.problem, built.x, out, lse, built.dout, built.dlse)
    return [t for t in (out, lse, *grads) if t is not None]


def test_three_threads_give_the_bits_of_one():
    built = build(CASE)
    alone = everything(built)
    torch.set_num_threads(3)
    assert all(torch.equal(a, b) for a, b in zip(everything(built), alone, strict=True))
    assert torch.get_num_threads() == 3


def test_every_item_is_worked_on_once_and_by_several_threads():
    torch.set_num_threads(3)
    meet, done, threads = threading.Barrier(3, timeout=60), [], set()

    def work(state, item):
        if item < 3:
            meet.wait()  # passes only if three threads work at a time
        done.append(item)
        threads.add(threading.get_ident())
        assert torch.get_num_threads() == 1 and not torch.is_grad_enabled()

    for_each([[i] for i in range(50)], work, contextlib.nullcontext)
    assert sorted(done) == list(range(50)) and len(threads) == 3


def test_a_thread_stays_with_a_group_and_then_helps_with_the_longest():
    torch.set_num_threads(2)
    groups, meet = [[(0, i) for i in range(3)], [(1, i) for i in range(9)]], threading.Barrier(2)
    helped, taken = threading.Event(), []

    def work(state, item):
        taken.append((threading.get_ident(), item))
        if item == (0, 0) or item == (1, 0):
            meet.wait(timeout=60)  # each thread has one group
        if item == (1, 1):
            assert helped.wait(timeout=60)  # the other thread goes on past its own group
        if item == (1, 2):
            helped.set()

    for_each(groups, work, contextlib.nullcontext)
    by_item = {item: thread for thread, item in taken}
    assert len({by_item[0, i] for i in range(3)}) == 1
    assert by_item[1, 2] == by_item[0, 0] != by_item[1, 0]
    assert len(taken) == len(by_item) == 12


@pytest.mark.parametrize("threads", [1, 2])
def test_an_error_reaches_the_caller(threads):
    torch.set_num_threads(threads)

    def work(state, item):
        if item == 3:
            raise KeyError("three")

    with pytest.raises(KeyError, match="three"):
        for_each([range(9)], work, contextlib.nullcontext)


@pytest.mark.parametrize("wrong", [0, 1] * 5)
def test_an_error_of_any_thread_reaches_the_caller(wrong):
    torch.set_num_threads(2)
    meet = threading.Barrier(2, timeout=60)

    def work(state, item):
        meet.wait()  # one item a thread
        if item == wrong:
            raise KeyError("one of two")

    with pytest.raises(KeyError, match="one of two"):
        for_each([[0], [1]], work, contextlib.nullcontext)


def test_inference_tensors_can_be_written():
    torch.set_num_threads(2)
    built = build(CASE)
    with torch.inference_mode():
        out = torch.empty(built.x.q.shape)
        got, _, _ = cpu.forward(built.problem, built.x, out)
    assert got is out and torch.isfinite(out[:, -1]).all()
    # Scratch outlives the call: what inference mode made could not be written to outside it.
    everything(built)


def test_a_thread_keeps_little_scratch():
    torch.set_num_threads(1)
    case = Case(batch=1, seqlen_q=3000, seqlen_k=3000, heads_q=8, head_dim=128, backward=False)
    built = build(case)
    cpu.forward(built.problem, built.x)
    kept = scores._scratch_of_thread(False).bytes
    assert 0 < kept <= scores.KEPT
    cpu.forward(built.problem, built.x)
    assert scores._scratch_of_thread(False).bytes == kept


# Small enough for every operation outside the threads to stay out of OpenMP, whose own threads no
# forked child may use; large enough for the backend's threads.
FORKED = Case(batch=1, seqlen_q=190, seqlen_k=190, heads_q=8, heads_k=8, head_dim=16)


def _in_child(queue):
    queue.put([t.sum().item() for t in everything(build(FORKED))])


def test_a_forked_child_makes_threads_of_its_own():
    torch.set_num_threads(2)
    want = [t.sum().item() for t in everything(build(FORKED))]
    fork = multiprocessing.get_context("fork")
    queue = fork.Queue()
    child = fork.Process(target=_in_child, args=(queue,), daemon=True)
    child.start()
    assert queue.get(timeout=60) == want
    child.join()
