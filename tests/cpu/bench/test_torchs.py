"""The table of torch's calls with heedful in their place: who runs what, and against what."""

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch
import torch.nn.functional as F

from heedful.bench import torchs
from heedful.integrations.torch import registry, restore

CPU = torch.device("cpu")
SMALL = torchs.Shape(1, 32, 4, 2, 16, True)


def test_a_shape_is_said_in_full():
    assert str(SMALL) == "1 x 32, 4/2 x 16 causal"
    assert len({str(shape) for shape in torchs.SHAPES}) == len(torchs.SHAPES) == 16


@pytest.mark.parametrize("backward", [False, True])
def test_both_calls_are_right_and_timed(backward):
    trial = torchs.Device((SMALL, backward), CPU)
    trial.enter_all()
    assert [*trial.calls] == ["flash_attn_func", "activate()"] and not trial.missing
    results = [call() for call in trial.calls.values()]
    assert all(len(result) == (3 if backward else 1) for result in results)


@pytest.mark.parametrize("batch", [1, 2, 4])
@pytest.mark.parametrize("heads_k", [1, 2, 4])
def test_torchs_call_shares_heads_of_keys_whatever_the_batch(batch, heads_k, monkeypatch):
    """As many entries as there are heads of queries or of keys, too."""
    asked, sdpa = [], F.scaled_dot_product_attention

    def noted(*given, **options):
        asked.append(options["enable_gqa"])
        return sdpa(*given, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    q, k, v = torchs.Shape(batch, 32, 4, heads_k, 16, True).draw(CPU, False)
    found = torchs.torchs(q.float(), k.float(), v.float(), True)
    torch.testing.assert_close(found, torchs.ours(q.float(), k.float(), v.float(), True))
    assert asked == [heads_k < 4]


def test_a_wrong_result_has_no_figure(monkeypatch):
    monkeypatch.setattr(torchs, "torchs", lambda q, k, v, causal: q * 2)
    lines = [*torchs.device_table(CPU, [SMALL, SMALL], 5)]
    assert "another result" in lines[1] and "another result" in lines[2] and len(lines) == 5


def test_the_last_row_of_the_host_alone_is_of_the_scope(monkeypatch):
    seen = {}

    def host_us(calls, wait, queued):
        wait()
        before = F.scaled_dot_product_attention
        seen[len(seen)] = before is not own
        return 1.0 + len(seen)

    own = F.scaled_dot_product_attention
    monkeypatch.setattr(torchs.timing, "host_us", host_us)
    monkeypatch.setattr(torchs, "SMALL", SMALL._replace(heads_k=4))
    trial = torchs.Host(1, CPU)
    names = [*trial.tensors]
    assert names == [
        "flash_attn_func",
        "activate()",
        "flash_attn_func, with gradients",
        "flash_attn_func, backward",
        "activate(), with gradients",
        "activate(), backward",
        "sdpa()",
    ]
    lines = [*torchs.host_table(CPU, 1, 5)]
    assert [*seen.values()][:7] == [False] * 6 + [True]
    assert len(lines) == 7 and lines[0].endswith("+0.0")


def test_the_program_says_where_it_cannot_run(capsys):
    with pytest.raises(torchs.script.Refused, match="GPU"):
        torchs.main()
    assert registry._active is None
    restore()


def test_the_program_says_both_tables_and_what_was_called(monkeypatch):
    said, order = [], []
    monkeypatch.setattr(torchs.script, "current_gpu", lambda: CPU)
    monkeypatch.setattr(torchs.script, "say", lambda *lines: said.extend(lines))
    monkeypatch.setattr(torchs, "activate", lambda: order.append("activate") or "a report")
    monkeypatch.setattr(torchs, "restore", lambda: order.append("restore"))
    monkeypatch.setattr(torchs, "device_table", lambda *what: [f"{what}"])
    monkeypatch.setattr(torchs, "host_table", lambda device: [f"host of {device}"])
    torchs.main()
    first = f"{(CPU, torchs.SHAPES, torchs.ROUNDS)}"
    assert said == [first, "", "host of cpu", "", "a report"]
    assert order == ["activate", "restore"]


def test_a_line_has_medians_of_both_and_the_ratio_of_torchs_over_ours(monkeypatch):
    times = {"flash_attn_func": [2.0, 4.0, 3.0], "activate()": [6.0, 6.0, 6.0]}
    monkeypatch.setattr(torchs.Device, "enter_all", lambda self: None)
    monkeypatch.setattr(torchs.Device, "times", lambda self, rounds: times)
    head, forward, backward = torchs.device_table(CPU, [SMALL], 3)
    assert head == " " * 35 + "flash_attn_func  activate()   ratio  (range)"
    figures = "             3.0         6.0   2.000  (1.500 to 3.000)"
    assert forward == f"{'forward  1 x 32, 4/2 x 16 causal':34}{figures}"
    assert backward == f"{'backward 1 x 32, 4/2 x 16 causal':34}{figures}"


def test_two_results_are_near_within_one_rounding_of_the_largest():
    y = torch.tensor([1.0, -8.0], dtype=torch.bfloat16)
    for moved, near in ((1 / 16, True), (-1 / 16, True), (0.0626, False)):
        assert torchs._are_near(torch.tensor([1.0 + moved, -8.0]), y) is near


def test_torchs_operator_gets_no_dropout_and_the_mask(monkeypatch):
    asked = []
    namespace = SimpleNamespace(
        _scaled_dot_product_flash_attention=lambda *given: asked.append(given) or ("out", "lse")
    )
    monkeypatch.setattr(torchs.torch, "ops", SimpleNamespace(aten=namespace))
    for causal in (False, True):
        q, k, v = SMALL.draw(CPU, False)
        assert torchs.operator(q, k, v, causal) == "out"
        (given,) = asked
        assert given[:3] == (q, k, v) and given[3:] == (0.0, causal)
        asked.clear()
