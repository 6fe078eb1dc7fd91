"""The README's picture shows all rows of the tables that it names, to scale, on light and dark
pages."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

import draw_docs
import draw_speed

ROOT = Path(__file__).parents[3]
SVG = "{http://www.w3.org/2000/svg}"
ROW = {"keys": "4 x 4096", "heads": "64/8", "dim": "128", "mask": "full"}


def test_speed_counts_products_of_query_heads_and_half_of_a_causal_square():
    us = {"heedful": "1000"}
    flops = 2 * 2 * 4 * 64 * 4096**2 * 128
    assert draw_speed.tflops(ROW | us, "heedful", 2) == pytest.approx(flops / 1e-3 / 1e12)
    causal = draw_speed.tflops(ROW | us | {"mask": "causal"}, "heedful", 5)
    assert causal == pytest.approx(flops * 5 / 2 / 2 / 1e-3 / 1e12)


def test_bars_are_geometric_means_of_every_row_of_a_dim_and_mask():
    times = [{"heedful": "100", "cuDNN": "200", "FA4": "400"}]
    times += [{"heedful": "400", "cuDNN": "200", "FA4": "100"}]
    drawn = draw_speed.panel("T", "F", [ROW | time for time in times], 2)
    assert list(drawn.bars) == ["D128 full"]
    assert drawn.bars["D128 full"] == pytest.approx([drawn.bars["D128 full"][1]] * 3)


def bars(colours: draw_speed.Colours) -> list[ElementTree.Element]:
    picture = ElementTree.parse(ROOT / "docs" / f"speed-{colours.name}.svg").getroot()
    return [rect for rect in picture.iter(f"{SVG}rect") if rect.get("height") != "11"]


@pytest.mark.parametrize("colours", draw_speed.COLOURS, ids=lambda colours: colours.name)
def test_bars_stand_on_one_line_and_are_as_high_as_their_speeds(colours):
    drawn = bars(colours)
    tables = [
        ("hopper-forward", "077-peers-of-november-28.csv", 2),
        ("hopper-backward", "086-peers-of-november-28.csv", 5),
    ]
    panels = [
        draw_speed.panel("", "", draw_docs.read(draw_docs.MEASUREMENTS / page / file).rows, count)
        for page, file, count in tables
    ]
    speeds = [speed for panel in panels for group in panel.bars.values() for speed in group]
    assert len(drawn) == len(speeds) == 36
    heights = [float(bar.get("height", "")) for bar in drawn]
    for bar, height, speed in zip(drawn, heights, speeds, strict=True):
        assert float(bar.get("y", "")) + height == pytest.approx(draw_speed.BASE)
        assert height == pytest.approx(max(heights) * speed / max(speeds), abs=0.06)
    assert {bar.get("fill") for bar in drawn} == set(colours.bars)


@pytest.mark.parametrize("colours", draw_speed.COLOURS, ids=lambda colours: colours.name)
def test_nothing_is_drawn_outside_of_the_picture(colours):
    picture = ElementTree.parse(ROOT / "docs" / f"speed-{colours.name}.svg").getroot()
    for text in picture.iter(f"{SVG}text"):
        # A letter is at most 0.62 of its size wide, on average.
        wide = 0.62 * float(text.get("font-size", "")) * len(text.text or "")
        begin = float(text.get("x", "")) - wide / 2 * (text.get("text-anchor") == "middle")
        assert begin >= 0 and begin + wide <= draw_speed.WIDTH, text.text


def test_the_readme_shows_the_picture_in_its_first_screen_with_words_for_who_cannot_see_it():
    head = (ROOT / "README.md").read_text(encoding="utf-8").split("\n## ")[0]
    assert '<source media="(prefers-color-scheme: dark)" srcset="docs/speed-dark.svg">' in head
    (alt,) = re.findall(r'<img alt="([^"]+)" src="docs/speed-light.svg"', head)
    assert all(name in alt for name in draw_speed.NAMES)
    assert re.search(r"^    pip install ", head, re.MULTILINE)
    assert head.index("pip install") < head.index("<picture>")
