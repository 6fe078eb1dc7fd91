"""Threads of the CPU backend change nothing but the time a call takes."""

import contextlib
import multiprocessing
import threading

import pytest
import torch

from heedful import cpu
from heedful.cpu import scores, workers
from heedful.cpu.workers import for_each
from support.problems.cases import Case, build

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


def test_a_queue_gives_the_longest_of_the_groups_that_others_began():
    queue = workers._Queue([[1, 2, 3], [4], [], [5, 6]])
    first, second, third = (queue.items() for _ in range(3))
    assert [next(first), next(second), next(third), len(queue)] == [1, 4, 5, 3]
    assert [next(first), list(second), list(first), list(third)] == [2, [3, 6], [], []]
    assert len(queue) == 0


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


class State:
    """Notes who enters and leaves it, and what is done in between."""

    log: list = []

    def __enter__(self):
        self.log.append(("enter", threading.get_ident()))
        return self

    def __exit__(self, *error):
        self.log.append(("leave", threading.get_ident()))

    def work(self, item):
        self.log.append((item, threading.get_ident()))


@pytest.fixture
def log(monkeypatch):
    monkeypatch.setattr(State, "log", [])
    return State.log


@pytest.mark.parametrize(
    ("groups", "more"),
    [([[0, 1], [], [2, 3, 4]], {"parallel": False}), ([[0]], {}), ([[], []], {}), ([], {})],
)
def test_without_need_of_threads_the_caller_does_all_in_order(groups, more, log):
    torch.set_num_threads(3)
    for_each(groups, State.work, State, **more)
    items = [item for group in groups for item in group]
    assert log == [(what, threading.get_ident()) for what in ("enter", *items, "leave")]


def test_each_thread_has_one_state_from_its_first_item_to_its_last(log):
    torch.set_num_threads(3)
    for_each([[number] for number in range(40)], State.work, State)
    by_thread: dict[int, list] = {}
    for what, thread in log:
        by_thread.setdefault(thread, []).append(what)
    assert len(by_thread) <= 3 and threading.get_ident() not in by_thread
    for own in by_thread.values():
        # A thread that was quick may have taken another's turn as well.
        marks = [what for what in own if isinstance(what, str)]
        assert marks == ["enter", "leave"] * (len(marks) // 2)
        assert (own[0], own[-1]) == ("enter", "leave")
    assert [what for what, _ in log].count("enter") == 3
    assert sorted(what for what, _ in log if not isinstance(what, str)) == list(range(40))
    # No more threads than items take part.
    del log[:]
    for_each([[0], [1]], State.work, State)
    assert [what for what, _ in log].count("enter") == 2


def test_an_error_is_raised_when_all_have_stopped():
    torch.set_num_threads(2)
    meet, ended = threading.Barrier(2, timeout=60), []

    def work(state, item):
        meet.wait()
        if item == 0:
            raise KeyError("zero")
        torch.mm(torch.randn(300, 300), torch.randn(300, 300))
        ended.append(item)

    with pytest.raises(KeyError, match="zero"):
        for_each([[0], [1]], work, contextlib.nullcontext)
    assert ended == [1]


def test_modes_of_the_caller_are_those_of_the_threads():
    torch.set_num_threads(2)
    found = []

    def work(state, item):
        found.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))

    for inference in (False, True):
        with torch.inference_mode(inference), torch.enable_grad():
            for_each([[0], [1], [2]], work, contextlib.nullcontext)
        assert found == [(inference, False)] * 3
        del found[:]


def test_threads_are_made_once_for_each_number(monkeypatch):
    monkeypatch.setattr(workers, "_pools", {})
    torch.set_num_threads(2)
    two = workers._pool()
    assert workers._pool() is two and torch.get_num_threads() == 2
    torch.set_num_threads(3)
    assert workers._pool() is not two and torch.get_num_threads() == 3
    torch.set_num_threads(2)
    assert workers._pool() is two


def test_threads_do_not_hold_the_process_up_and_are_named():
    made = []
    pool = workers._Pool(2)
    assert pool.run(lambda: made.append(threading.current_thread()), 5) == [None] * 5
    assert len(made) == 5 and all(thread.daemon for thread in made)
    assert {thread.name for thread in made} == {"heedful-cpu"}


def test_where_threads_run_out_those_that_began_end_and_the_caller_works(monkeypatch, log):
    torch.set_num_threads(3)
    monkeypatch.setattr(workers, "_pools", {})
    began, plain = [], threading.Thread

    class Few(threading.Thread):
        def start(self):
            if len(began) == 2:
                raise RuntimeError("can't start new thread")
            began.append(self)
            super().start()

    monkeypatch.setattr(threading, "Thread", Few)
    for_each([[0], [1], [2]], State.work, State)
    assert log == [(what, threading.get_ident()) for what in ("enter", 0, 1, 2, "leave")]
    for thread in began:
        thread.join(60)
        assert not thread.is_alive()
    assert len(began) == 2 and workers._pools == {}
    # Another time there may be more.
    monkeypatch.setattr(threading, "Thread", plain)
    assert workers._pool() is not None
