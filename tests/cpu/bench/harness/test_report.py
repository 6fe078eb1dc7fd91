"""Tables, lines, summaries and pictures of a benchmark show the figures that were measured, and
say of every other why it is missing."""

import dataclasses
import json
from functools import partial

import pytest
from matplotlib import colors, pyplot
from rich.console import Console

from heedful.bench.harness import report
from heedful.bench.harness.cases import Case, cases
from heedful.bench.harness.check import OUTSIDE
from heedful.bench.harness.peers import PEERS
from heedful.bench.harness.run import Figure, Outcome, kv_gb_per_s, tflops
from heedful.bench.harness.timing import Spread
from heedful.core.call.problem import AttentionProblem


def dense(group: str = "forward", **facts) -> Case:
    problem = AttentionProblem.dense(2, 128, 128, 4, 2, 64, dtype="bfloat16", **facts)
    return Case(group, problem)


def figure(name: str, time: float, ratio: float | None = None) -> Figure:
    """Rounds between half and three times the median."""
    over = None if ratio is None else Spread(ratio, ratio / 2, ratio * 4)
    return Figure(name, Spread(time, time / 2, time * 3), over)


def outcome(case: Case, *figures: Figure, base: str | None = "flash") -> Outcome:
    return Outcome(case, base, list(figures))


def missing(name: str, why: str = "is not installed") -> Figure:
    return Figure(name, missing=why)


def wrong(name: str) -> Figure:
    return Figure(name, missing="out is not finite", wrong=True)


FLOPS = 4 * 2 * 4 * 128 * 128 * 64
KV_BYTES = 2 * 128 * 2 * 128 * 2


def test_speeds_are_work_over_the_median():
    spread = Spread(8.0, 1.0, 100.0)
    assert tflops(dense(), spread) == pytest.approx(FLOPS / 8e-6 / 1e12)
    assert kv_gb_per_s(dense(), spread) == pytest.approx(KV_BYTES / 8e-6 / 1e9)


@pytest.mark.parametrize(
    ("case", "unit", "want"),
    [
        (dense(), "TFLOP/s", FLOPS / 8e-6 / 1e12),
        (dense("backward"), "TFLOP/s", FLOPS / 8e-6 / 1e12),
        (dense("splits"), "TFLOP/s", FLOPS / 8e-6 / 1e12),
        (dense("cpu"), "GFLOP/s", FLOPS / 8e-6 / 1e9),
        (dense("decode"), "us", 8.0),
        (dataclasses.replace(dense("overhead"), host=True), "us on the host", 8.0),
        (dataclasses.replace(dense("decode"), host=True), "us on the host", 8.0),
    ],
)
def test_a_cases_unit_and_value(case, unit, want):
    assert report.unit(case) == unit
    assert report.in_unit(case, 8.0) == pytest.approx(want)


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (1234.4, "1234"),
        (100.0, "100"),
        (100.4, "100"),
        (99.94, "99.9"),
        (1.0, "1"),
        (0.1234, "0.123"),
    ],
)
def test_no_more_digits_are_shown_than_a_measurement_is_worth(number, shown):
    assert report._digits(number) == shown


def columns(table) -> dict[str, list[str]]:
    return {str(column.header): list(column.cells) for column in table.columns}


def test_a_table_has_a_row_a_case_and_a_column_a_peer_that_was_timed():
    one, two = dense("decode"), dense("decode", causal=True)
    table = report.table(
        "decode",
        [
            outcome(one, figure("heedful", 8.0, 2.5), figure("flash", 20.0, 1.0), missing("fa3")),
            outcome(two, wrong("heedful"), missing("flash"), missing("fa3"), base=None),
        ],
    )
    rate = f"{KV_BYTES / 8e-6 / 1e9:.0f}"
    assert columns(table) == {
        "case": [one.name, two.name],
        "heedful": [f"8 ({rate} GB/s)\n2.50 (1.25 to 10.00)", "[bold red]wrong[/]"],
        # The base has no ratio to itself.
        "flash": [f"20 ({KV_BYTES / 20e-6 / 1e9:.0f} GB/s)", "-"],
    }
    assert [column.justify for column in table.columns] == ["left", "right", "right"]
    assert table.title == (
        "decode: one new token, or four, over a KV cache, us;"
        " ratios: speed over flash, median (range of rounds)"
    )
    assert (table.title_justify, table.title_style) == ("left", "bold")


def test_a_table_has_a_column_a_peer_if_it_is_as_wide_as_it_may_be():
    made = outcome(dense(), figure("heedful", 8.0, 2.5), figure("flash", 20.0), figure("math", 9.0))
    needed = Console(width=1000).measure(report.table("forward", [made])).maximum
    assert [*columns(report.table("forward", [made], needed))] == [
        *("case", "heedful", "flash", "math")
    ]
    assert [*columns(report.table("forward", [made], needed - 1))] == [
        *("case and peer", "figure", "ratio")
    ]


def test_a_table_names_every_base_once_or_none():
    case = dense()
    own = [outcome(case, figure("heedful", 8.0), base=b) for b in ("math", None, "flash", "math")]
    assert "speed over flash, math, median" in str(report.table("forward", own).title)
    alone = report.table("forward", [own[1]])
    assert alone.title == "forward: training and prefill shapes, forward, TFLOP/s"
    assert columns(alone)["heedful"] == ["4.19"]


def test_a_peer_that_was_left_out_of_a_case_has_a_dash():
    both = [
        outcome(dense(), figure("heedful", 8.0), figure("math", 20.0)),
        outcome(dense(causal=True), figure("heedful", 8.0)),
    ]
    assert columns(report.table("forward", both))["math"][1] == "-"


def test_an_error_over_its_budget_is_not_called_wrong():
    reason = f"dq of batch 0, KV head 1 is {OUTSIDE}: largest error 2e-06, allowed 1e-06"
    over = Figure("heedful", missing=reason, wrong=True)
    assert report.line(outcome(dense(), over)) == (
        f"{dense().name} [TFLOP/s]: heedful [bold red]outside of its error budget[/]"
    )


def test_a_line_for_logs_has_what_was_timed_and_what_was_wrong():
    made = outcome(
        dense(), figure("heedful", 8.0, 2.5), figure("flash", 20.0), missing("fa3"), wrong("fa4")
    )
    assert report.line(made) == (
        f"{dense().name} [TFLOP/s]: heedful 16.8 x 2.50 (1.25 to 10.00); flash 6.71;"
        " fa4 [bold red]wrong[/]"
    ).replace("16.8", f"{FLOPS / 8e6:.3g}").replace("6.71", f"{FLOPS / 20e6:.3g}")


def test_a_reason_is_told_once_with_the_cases_that_it_holds_for():
    three = [dense(), dense(causal=True), dense("cpu")]
    why = "needs [cuda]"
    outcomes = [outcome(case, missing("fa3"), missing("fa4", why), base=None) for case in three[:2]]
    outcomes.append(outcome(three[2], missing("fa3"), figure("fa4", 8.0)))
    everywhere, somewhere = report.absences(iter(outcomes))
    assert everywhere == "[bold]fa3[/]: is not installed"
    names = f"{three[0].name}; {three[1].name}"
    assert somewhere == rf"[bold]fa4[/]: needs \[cuda] [dim]({names})[/]"
    name = dense().name
    for count in (3, 4):
        many = [outcome(dense(), missing("fa3"), base=None)] * count + [outcome(dense())]
        assert report.absences(many)[0].endswith(f"({name}; {name}; {count - 2} more)[/]")
    assert report.absences([outcome(dense(), figure("heedful", 8.0))]) == []


def test_a_summary_compares_with_each_and_with_the_best_rival():
    one, two = dense(), dense(causal=True)
    outcomes = [
        outcome(one, figure("heedful", 10), figure("flash", 20), figure("math", 80)),
        outcome(two, figure("heedful", 40), figure("flash", 20), figure("math", 10)),
        # Cases that either has no figure of do not count.
        outcome(one, figure("heedful", 40), missing("flash"), wrong("math")),
        outcome(one, missing("heedful"), figure("flash", 1), figure("math", 1)),
    ]
    outcomes[2].case = outcomes[3].case = dense("cpu")
    assert report.summary(outcomes) == [
        f"heedful / flash: geometric mean 1.000 over 2 cases, worst 0.500 ({two.name})",
        f"heedful / math: geometric mean 1.414 over 2 cases, worst 0.250 ({two.name})",
        f"heedful / best peer: geometric mean 0.707 over 2 cases, worst 0.250 ({two.name})",
    ]


def test_a_forced_backend_is_compared_but_is_no_rival():
    made = [outcome(dense(), figure("heedful", 10), figure("heedful:cpu", 5), figure("flash", 20))]
    first, second = report.summary(made)
    assert first.startswith("heedful / heedful:cpu: geometric mean 0.500 over 1 cases")
    assert second.startswith("heedful / flash: geometric mean 2.000")
    other = report.summary(made, "flash")
    assert [line.split(":  ")[0].split(": geo")[0] for line in other] == [
        "flash / heedful",
        "flash / heedful:cpu",
    ]
    alone = [outcome(dense(), figure("heedful", 10), missing("flash"), missing("math"))]
    assert report.summary(alone) == []


def test_records_are_added_one_a_line(tmp_path):
    path = tmp_path / "a" / "b" / "lines.jsonl"
    report.append_json_lines(path, iter([{"a": 1}, {"b": "\u00b5"}]))
    report.append_json_lines(path, iter([{"c": None}]))
    text = path.read_text(encoding="utf-8")
    assert [json.loads(line) for line in text.splitlines()] == [
        {"a": 1},
        {"b": "\u00b5"},
        {"c": None},
    ]
    assert text.endswith("}\n")


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draws a picture and gives the figure that was saved."""
    closed = []
    monkeypatch.setattr(pyplot, "close", closed.append)

    def draw(outcomes):
        path = tmp_path / "a" / "b" / "figure.png"
        report.picture(path, outcomes, "where and when")
        assert path.read_bytes().startswith(b"\x89PNG")
        return closed.pop()

    yield draw
    monkeypatch.undo()
    pyplot.close("all")


def bars(axis) -> list:
    """(middle, height, colour) from left to right."""
    found = [(p.get_x() + p.get_width() / 2, p.get_height(), p) for p in axis.patches]
    return [
        (x, y, colors.to_hex(p.get_facecolor())) for x, y, p in sorted(found, key=lambda f: f[0])
    ]


def test_a_picture_has_a_panel_a_kind_and_a_bar_a_figure(drawn):
    full, causal = dense(), dense(causal=True)
    made = drawn(
        [
            outcome(full, figure("heedful", 8.0), figure("flash", 20.0), missing("fa3")),
            outcome(causal, figure("heedful", 5.0), wrong("flash"), missing("fa3")),
            outcome(
                dataclasses.replace(full, direction="backward"),
                figure("heedful", 10.0),
                figure("flash", 10.0),
            ),
        ]
    )
    titles = ["forward, head dim 64, full", "forward, head dim 64, causal"]
    titles.append("backward, head dim 64, full")
    assert [axis.get_title(loc="left") for axis in made.axes[:3]] == titles
    assert [axis.get_visible() for axis in made.axes] == [True, True, True, False]
    # Two panels a row, each as wide and as high as one alone.
    assert made.axes[0].get_subplotspec().get_gridspec().get_geometry() == (2, 2)
    assert made.get_size_inches().tolist() == [15.0, pytest.approx(8.0)]
    first, second, third = (bars(axis) for axis in made.axes[:3])
    heights = FLOPS / 8e6, FLOPS / 20e6
    assert [height for _, height, _ in first] == pytest.approx(heights)
    assert [colour for *_, colour in first] == ["#d1495b", "#8d99ae"]
    # The bars of a case stand side by side around its tick; none stands for a missing
    # figure, and words for a wrong one.
    assert [x for x, *_ in first] == pytest.approx([-0.205, 0.205])
    ((x, height, _),) = second
    assert (x, height) == pytest.approx((-0.205, FLOPS / 2 / 5e6))
    assert made.axes[1].texts[-1].get_text() == "flash failed"
    assert len(third) == 2 and third[0][1] == pytest.approx(2.5 * FLOPS / 10e6)
    (legend,) = made.legends
    assert [text.get_text() for text in legend.get_texts()] == ["heedful", "flash"]
    handles = [colors.to_hex(patch.get_facecolor()) for patch in legend.get_patches()]
    assert handles == ["#d1495b", "#8d99ae"]
    assert [text.get_text() for text in made.texts] == ["where and when"]
    for axis in made.axes[:3]:
        assert axis.get_ylabel() == "TFLOP/s" and axis.get_yscale() == "linear"
        assert [tick.get_text() for tick in axis.get_xticklabels()] == ["2 x 128\nheads 4/2"]
        assert not axis.spines["top"].get_visible() and not axis.spines["right"].get_visible()


def test_a_bar_says_its_figure_and_its_range(drawn):
    (axis,) = drawn([outcome(dense(), figure("heedful", 8.0), figure("flash", 20.0))]).axes
    for text, container, time in zip(
        axis.texts, [c for c in axis.containers if hasattr(c, "has_yerr")], (8.0, 20.0), strict=True
    ):
        middle = FLOPS / time / 1e6
        assert text.get_text() == report._digits(middle)
        # A round of half the time is twice as fast.
        (segment,) = container.lines[2][0].get_segments()
        assert sorted(segment[:, 1]) == pytest.approx([middle / 3, middle * 2])
        assert text.xy == (pytest.approx(segment[0, 0]), pytest.approx(middle * 2))
        assert text.get_rotation() == 0


@pytest.mark.parametrize(("count", "rows", "columns"), [(1, 1, 1), (2, 1, 2), (5, 3, 2)])
def test_panels_lie_two_by_two(drawn, count, rows, columns):
    problems = [AttentionProblem.dense(1, 8, 8, 2, 2, 32 + 8 * panel) for panel in range(count)]
    made = drawn([outcome(Case("forward", p), figure("heedful", 8.0)) for p in problems])
    grid = made.axes[0].get_gridspec()
    assert (grid.nrows, grid.ncols) == (rows, columns)


def test_nothing_in_a_picture_covers_anything_else(drawn):
    """Twelve peers and two rows of panels: what a run without any option may draw at most."""
    figures = [figure(name, 8.0 + number, 1.0) for number, name in enumerate(PEERS)]
    groups = [("forward", False), ("forward", True), ("cpu", False)]
    made = drawn([outcome(dense(group, causal=causal), *figures) for group, causal in groups])
    draw = made.canvas.get_renderer()
    (legend,), (footer,) = made.legends, made.texts
    whole = made.bbox
    boxes = [axis.get_tightbbox(draw) for axis in made.axes if axis.get_visible()]
    boxes += [legend.get_window_extent(draw), footer.get_window_extent(draw)]
    for number, box in enumerate(boxes):
        assert whole.x0 <= box.x0 < box.x1 <= whole.x1 and whole.y0 <= box.y0 < box.y1 <= whole.y1
        assert not any(box.overlaps(other) for other in boxes[:number])
    # The legend is one line at the top, in the middle; the footer is at the bottom on the left.
    assert len({round(text.get_window_extent(draw).y0) for text in legend.get_texts()}) == 1
    assert not legend.get_frame_on() and whole.y1 - boxes[-2].y1 < 0.03 * whole.height
    assert abs((boxes[-2].x0 + boxes[-2].x1) / 2 - whole.width / 2) < 0.01 * whole.width
    assert boxes[-1].y1 < 0.02 * whole.height and boxes[-1].x0 < 0.02 * whole.width
    # Panels fill what they leave.
    assert sum(box.width * box.height for box in boxes[:2]) > 0.4 * whole.width * whole.height


def test_a_picture_can_be_read(drawn):
    made = drawn([outcome(dense(), figure("heedful", 8.0), figure("flash", 9.0))])
    (axis,) = made.axes
    first, second = axis.patches
    # Bars stand side by side, with a little room between them and more around a case's.
    assert 0 < second.get_x() - first.get_x() - first.get_width() < 0.1 * first.get_width()
    assert 0.7 < second.get_x() + second.get_width() - first.get_x() < 0.9
    (label, _), tick = axis.texts, axis.get_xticklabels()[0]
    assert 6 < label.get_fontsize() < tick.get_fontsize() < axis.title.get_fontsize()
    assert 6 < made.texts[0].get_fontsize() < tick.get_fontsize()
    assert axis._left_title.get_fontweight() == "bold"
    assert made.dpi == 130 and tick.get_fontsize() < 10
    assert (label.get_ha(), label.anncoords, label.xyann) == ("center", "offset points", (0, 3))
    lines = [line for line in axis.get_ygridlines() if line.get_visible()]
    assert lines and not any(line.get_visible() for line in axis.get_xgridlines())
    shades = {colors.to_hex(line.get_color()) for line in lines}
    greys = [*shades, colors.to_hex(made.texts[0].get_color())]
    assert all(len({shade[i : i + 2] for i in (1, 3, 5)}) == 1 for shade in greys)
    # The grid lies behind the bars, and a bar's range before it, with caps.
    assert axis.get_axisbelow() is True
    (bar,) = [c for c in axis.containers if hasattr(c, "has_yerr")][:1]
    assert bar.lines[2][0].get_zorder() > first.get_zorder() and len(bar.lines[1]) == 2
    assert colors.to_hex(bar.lines[2][0].get_color()[0]) == "#333333"
    # Labels above the highest range stay within the panel.
    highest = max(FLOPS / 4e6, FLOPS / 4.5e6)
    assert 1.1 * highest < axis.get_ylim()[1] < 1.3 * highest


def test_labels_of_many_bars_stand_upright(drawn):
    many = [outcome(dense(), figure("heedful", 8.0), figure("flash", 9.0))] * 7
    assert {text.get_rotation() for text in drawn(many).axes[0].texts} == {90}
    one = [outcome(dense(), figure("heedful", 8.0))] * 13
    assert {text.get_rotation() for text in drawn(one).axes[0].texts} == {90}
    assert {text.get_rotation() for text in drawn(many[:6]).axes[0].texts} == {0}


def test_times_of_several_cases_are_on_a_logarithmic_scale(drawn):
    step = outcome(dense("decode"), figure("heedful", 8.0))
    assert drawn([step, step]).axes[0].get_yscale() == "log"
    assert drawn([step]).axes[0].get_yscale() == "linear"
    host = outcome(dataclasses.replace(dense("overhead"), host=True), figure("heedful", 8.0))
    assert drawn([host, host]).axes[0].get_yscale() == "linear"


def test_a_picture_without_figures_is_drawn_all_the_same(drawn):
    made = drawn([outcome(dense(), missing("heedful"), base=None)])
    assert len(made.axes) == 1 and not made.axes[0].patches
    assert made.get_size_inches().tolist() == [7.5, pytest.approx(4.4)]


@pytest.mark.parametrize(
    ("case", "panel"),
    [
        (dense(), ("forward", "head dim 64, full")),
        (dense(causal=True), ("forward", "head dim 64, causal")),
        (dense("cpu"), ("forward", "full")),
        (dense("decode", causal=True), ("decode", "head dim 64")),
        (dense("splits"), ("splits", "head dim 64")),
        (
            dataclasses.replace(dense(), host=True),
            ("host time of a call", "2 x 128, head dim 64"),
        ),
    ],
)
def test_panels_part_what_is_not_comparable(case, panel):
    assert report._panel(case) == panel


def test_labels_say_what_a_panel_does_not():
    uneven = AttentionProblem.dense(2, 1, 128, 4, 2, 64)
    assert report._label(Case("decode", uneven)) == "2 x 1 x 128\nheads 4/2"
    assert report._label(dense("cpu")) == "2 x 128\nheads 4/2 of 64"
    assert [report._label(case) for case in cases("overhead")] == [
        "forward",
        "forward\nwith grad",
        "backward",
        "decode\nover pages",
        "forward\ncompiled",
    ]


def test_every_peer_has_a_colour_of_its_own():
    spare = ["heedful:cpu", "heedful:portable", "heedful:a", "heedful:b", "heedful:c"]
    names = [*spare[:2], *PEERS, *spare[2:]]
    colour = partial(report._colour, peers=names)
    made = [colour(name) for name in names]
    assert all(colors.is_color_like(one) for one in made)
    # Four colours are spare; the fifth peer that needs one begins again.
    assert len(set(made)) == len(names) - 1 and colour("heedful:c") == colour("heedful:cpu")


def test_a_range_is_told_in_the_cases_unit():
    time = figure("heedful", 8.0).time_us
    assert time is not None
    assert report._range(dense("decode"), time) == (8.0, 4.0, 16.0)
    middle = FLOPS / 8e6
    _, below, above = report._range(dense(), time)
    assert (below, above) == (pytest.approx(middle * 2 / 3), pytest.approx(middle))
