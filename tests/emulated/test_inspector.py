"""The inspector counts what is in the code and knows the targets' limits."""

import itertools
import json
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from emulated.helpers.compiled import attention, names
from emulated.helpers.snippets import kernel
from heedful.core.base.device import by_name
from heedful.core.call.problem import AttentionProblem
from heedful.core.planning.plan import plan
from heedful.inspector import (
    NvidiaInspection,
    inspect,
    of_program,
    render,
    segments_table,
    table,
    timeline_svg,
    to_json,
)
from heedful.inspector.command import main
from heedful.inspector.nvidia import Instruction, hot_loop, measure, parse_sass
from heedful.inspector.timeline import events
from heedful.launch.program.programs import program
from support.problems.grids import slow_but

LOOP = """
    s_mov_b32 s8, 4
1:
    buffer_load_dwordx4 v0, s[20:23], 0 offen lds
    ds_read_b64_tr_b16 v[10:11], v0
    ds_read_b128 v[12:15], v0
    s_waitcnt vmcnt(0) lgkmcnt(0)
    s_barrier
    v_mfma_f32_32x32x16_bf16 v[20:35], v[10:13], v[12:15], v[20:35]
    v_exp_f32_e32 v1, v2
    v_pk_mul_f32 v[4:5], v[6:7], v[8:9]
    v_mul_lo_u32 v1, v2, v3
    s_waitcnt vmcnt(3)
    s_sub_i32 s8, s8, 1
    s_cbranch_scc1 1b
    v_mfma_f32_16x16x32_bf16 v[20:23], v[10:13], v[12:15], v[20:23]
"""


@pytest.fixture
def found():
    return inspect(kernel(LOOP, arch="gfx950"), lds_bytes=65536)


def test_the_hot_loop_is_counted_in_slots(found):
    loop = found.loop
    assert (loop.mfma, loop.mfma_slots) == (1, 8)
    assert (loop.valu, loop.valu_slots, loop.exp) == (3, 4 + 1 + 4, 1)
    assert (loop.lds, loop.transposed, loop.dma, loop.vmem) == (2, 1, 1, 1)
    assert loop.lds_bytes == 64 * (8 + 16 + 16) and loop.lds_slots == 20
    assert (loop.waits, loop.drains, loop.barriers) == (2, 1, 1)
    assert loop.bound == ("lds", 20.0) and loop.mfma_ceiling == 8 / 20
    assert found.whole.mfma == 2


def test_segments_end_at_barriers(found):
    assert [s.mfma for s in found.segments] == [0, 1]
    assert [s.drains for s in found.segments] == [1, 0]


@pytest.mark.parametrize(
    ("changes", "waves", "limit"),
    [
        ({}, 8, "hardware"),
        ({"vgprs": 65}, 7, "vgpr"),
        ({"vgprs": 256}, 2, "vgpr"),
        ({"vgprs": 512}, 1, "vgpr"),
        ({"sgprs": 106}, 7, "sgpr"),
        ({"lds_bytes": 65536}, 2, "lds"),
        ({"lds_bytes": 81920}, 2, "lds"),
        ({"lds_bytes": 81921}, 1, "lds"),
        ({"arch": "gfx942", "lds_limit": 65536, "lds_bytes": 32769}, 1, "lds"),
    ],
)
def test_occupancy_counts_registers_and_lds(found, changes, waves, limit):
    small = replace(found.resources, vgprs=32, sgprs=32, lds_bytes=0, waves=4)
    occupancy = replace(small, **changes).occupancy()
    assert (occupancy.waves, occupancy.limit) == (waves, limit)


def test_lds_past_the_target_s_limit_is_seen():
    text = kernel("s_nop 0", arch="gfx942")
    assert inspect(text, lds_bytes=65536).resources.fits
    assert not inspect(text, lds_bytes=65537).resources.fits


@pytest.mark.parametrize("name", names())
def test_compiled_attention_is_read(name):
    artifact = attention(name)
    found = inspect(artifact.text, lds_bytes=artifact.shared_bytes)
    r = found.resources
    assert r.arch == name.split("-")[0] and r.waves == artifact.num_warps and r.fits
    assert 0 < r.vgprs <= 512 and r.occupancy().waves >= 1
    assert found.loop is not None and found.loop.mfma and found.loop.exp
    assert sum(s.instructions for s in found.segments) == found.loop.instructions
    assert found.whole.instructions == sum(found.whole.counts.values())
    assert (found.whole.dma > 0) == (r.arch == "gfx950")


def test_tables_put_kernels_side_by_side(found):
    other = inspect(kernel(LOOP, arch="gfx950"), label="other", tiles=2)
    lines = table([found, other]).splitlines()
    row = next(line for line in lines if line.startswith("mfma slots"))
    assert row.split()[-2:] == ["8", "4"]
    assert "other" in lines[0] and len({len(x.split("  ")) for x in lines}) > 1
    assert segments_table([found, other]).count("\n") == 2


def test_a_kernel_without_a_loop_is_no_error():
    found = inspect(kernel("s_nop 0"))
    assert found.loop is None and "-" in table([found])


def test_json_has_the_same_figures(found):
    (facts,) = json.loads(to_json([found]))
    assert facts["loop"]["mfma_slots"] == found.loop.mfma_slots
    assert facts["resources"]["lds_bytes"] == 65536 and len(facts["segments"]) == 2


def test_the_timeline_shows_every_instruction_of_the_loop(found):
    root = ElementTree.fromstring(timeline_svg(found))
    boxes = [e for e in root.iter() if e.tag.endswith("rect")]
    assert len(boxes) == found.loop.instructions
    assert any("v_mfma" in (e.text or "") for e in root.iter() if e.tag.endswith("title"))


def listing(*texts: str, uppers=()) -> str:
    """What nvdisasm makes of labels and instructions, with the upper halves of their encodings."""
    lines = []
    halves = itertools.chain(uppers, itertools.repeat("0" * 16))
    for text in texts:
        if text.endswith(":"):
            lines.append(text)
        else:
            lines.append(f"        /*0000*/  {text} ;  /* 0x{0:016x} */")
            lines.append(f"                  /* 0x{next(halves)} */")
    return "\n".join(lines)


SASS = listing(
    "LDC R1, c[0x0][0x28]",
    ".L_x_1:",
    "HGMMA.64x64x16.F32.BF16 R88, gdesc[UR12], RZ, !UPT",
    "@!P1 FFMA R2, R2, R3, -R9",
    "MUFU.EX2 R4, R9",
    "LDS.128 R4, [R9]",
    "UTMALDG.2D [UR8], [UR4]",
    "@P0 BRA `(.L_x_1)",
    "EXIT",
)


def test_sass_is_counted_by_unit_and_its_loops_are_found():
    code, labels, branches = parse_sass(SASS)
    assert len(code) == 8 and labels == {".L_x_1": 1} and branches == [(6, ".L_x_1")]
    sass = measure(code)
    assert (sass.wgmma, sass.tensor_cycles) == (1, 32.0)
    assert (sass.floats, sass.predicated) == (1, 1)
    assert (sass.mufu, sass.mufu_cycles, sass.shared) == (1, 8, 1)
    assert (sass.memory, sass.tma, sass.spills) == (1, 1, 0)


def test_the_hot_loop_is_the_innermost_one_with_products():
    """Not the loop over tiles around it, nor one that waits or recomputes inside of it."""
    step = (".L_step:", "QGMMA.64x64x32.F32.E4M3.E4M3 R24, gdesc[UR4], R24")
    wait = (".L_wait:", "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R0", "@!P0 BRA `(.L_wait)")
    tile = (".L_tile:", "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], RZ", *step, *wait)
    text = listing(*tile, "@P1 BRA `(.L_step)", "STG R0, R2", "@P2 BRA `(.L_tile)", "EXIT")
    found = hot_loop(*parse_sass(text)) or []
    assert [x.text.split(".")[0] for x in found] == ["QGMMA", "SYNCS", "@!P0 BRA `(", "@P1 BRA `("]


def test_what_few_steps_need_behind_a_hot_loop_is_none_of_it():
    """It returns to where the loop begins, by a branch of its own."""
    step = (".L_step:", "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], RZ", "@P1 BRA `(.L_step)")
    again = ("@P2 BRA `(.L_out)", "HMMA.16816.F32.BF16 R0, R4, R8, R0", "BRA `(.L_step)")
    found = hot_loop(*parse_sass(listing(*step, *again, ".L_out:", "EXIT"))) or []
    assert [x.text.split(".")[0] for x in found] == ["HGMMA", "@P1 BRA `("]


@pytest.mark.parametrize("shape", ["HGMMA.64x128x16.F32.BF16", "QGMMA.64x128x32.F32.E4M3.E4M3"])
def test_a_wgmma_takes_the_cycles_that_the_device_does(shape):
    """Nsight Compute, H200, 2 x 8192, 16 heads, D128 on 132 SMs: 4.19e6 HGMMA kept the matrix unit
    active for 95 % of 2.23e6 cycles and 2.10e6 QGMMA for 59 % of 1.79e6: 66 to 67 each, cycles
    in which only some SMs still work included."""
    assert measure([Instruction(f"{shape} R24, gdesc[UR40], R24", 1)]).tensor_cycles == 64.0


def test_cycles_between_instructions_are_those_that_the_assembler_wrote():
    """ptxas 13.4: the second of two exponentials comes 8 cycles later, the rate of their unit, and
    what a vote found is there 13 cycles later; what may follow at once takes a cycle."""
    encoded = {"000f300000000800": 8, "000ea20000000800": 1, "000fda0000000100": 13}
    texts = ("MUFU.EX2 R49, R49", "MUFU.EX2 R40, R40", "VOTE.ANY P0, P0")
    code, _, _ = parse_sass(listing(*texts, uppers=encoded))
    assert [each.text for each in code] == list(texts)
    assert [each.cycles for each in code] == list(encoded.values())
    assert measure(code).issue_cycles == sum(encoded.values())


@pytest.mark.parametrize("device", slow_but({"H200", "MI355X"}, ["H200", "MI300X", "MI355X"]))
def test_a_problem_is_inspected_for_any_target_without_a_gpu(device):
    problem = AttentionProblem.dense(1, 512, 512, 4, head_dim=64, dtype="bfloat16")
    chosen = plan(problem, by_name(device), backend="portable")
    found = of_program(program(chosen, "forward"), chosen.device.arch)
    text = render(found)
    attention = found[0]
    assert attention.loop is not None
    if isinstance(attention, NvidiaInspection):
        assert attention.registers > 32 and attention.loop.wgmma and "tensor cycles" in text
        assert attention.loop.issue_cycles >= attention.loop.instructions
    else:
        assert attention.loop.mfma and "waves per SIMD" in text
    assert isinstance(attention, NvidiaInspection) == (device == "H200")


def test_the_command_reads_files_and_draws(tmp_path, capsys):
    path, picture = tmp_path / "ours.s", tmp_path / "loop.svg"
    path.write_text(kernel(LOOP, arch="gfx950"))
    words = [str(path), str(path), "--lds", "65536", "--segments", "--svg", str(picture)]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "65536 of 163840" in shown and "segment" in shown
    assert picture.read_text().startswith("<svg")
    assert main([str(tmp_path / "missing.s")]) == 2


def test_the_timeline_keeps_vector_work_off_while_an_mfma_reads_its_sources():
    """32 bytes of A and B a lane: until slot 3. Other units go on at once."""
    body = "s_mov_b32 s8, 4\n1:\nv_mfma_f32_32x32x16_bf16 v[20:35], v[4:7], v[8:11], v[20:35]\n"
    body += "v_add_f32_e32 v1, v2, v3\ns_sub_u32 s8, s8, 1\ns_cbranch_scc0 1b\n"
    inspection = inspect(kernel(body, arch="gfx950"))
    starts = {i.base: start for _, start, _, i in events(inspection)}
    assert starts["v_mfma_f32_32x32x16_bf16"] == 0 and starts["v_add_f32"] == 3
    swapped = body.replace("v_add_f32_e32 v1, v2, v3\n", "s_add_u32 s9, s9, s9\n")
    starts = {i.base: s for _, s, _, i in events(inspect(kernel(swapped, arch="gfx950")))}
    assert starts["s_add_u32"] == 1
