"""Two checkouts in turns on one GPU: events behind a cold L2, known calls of the host, CUPTI."""

import json
from pathlib import Path

import pytest
import torch

import heedful
from ab.__main__ import main

pytestmark = pytest.mark.gpu
SOURCES = str(Path(heedful.__file__).parents[1])
# By table words of a case. How far equal code may differ on a busy machine is nothing to test.
CASES = {
    "decode": "1x1x8192",
    "steps": "64 x 1024, pages of 16",
    "modified": "forward 4x4096 h16 d128 causal softcap",
    "backward": "4x4096x4096 h16/16 d128 bfloat16 causal",
    "host": "decode, appended with rotary",
    "lengths": "packed, forward and backward",
    "jax": "forward 16x1024x1024 h16/16 d128 bfloat16 causal",
}


@pytest.mark.parametrize("table", CASES)
def test_one_source_against_itself_gives_a_figure(table, tmp_path, capsys):
    if table == "jax":
        pytest.importorskip("jax")
    out = tmp_path / "figures.jsonl"
    options = ["--tables", table, "--match", CASES[table], "--rounds", "5", "--jobs", "1"]
    main([SOURCES, SOURCES, *options, "--json-lines", str(out)])
    said = capsys.readouterr().out
    assert torch.cuda.get_device_name() in said
    assert out.exists(), said
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert records, said
    for record in records:
        assert record["base_us"] > 0
        assert 0 < record["low"] <= record["ratio"] <= record["high"]
