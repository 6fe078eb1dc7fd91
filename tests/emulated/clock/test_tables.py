"""The tables of predictions are of this clock, and say how wrong it is."""

import csv
from pathlib import Path

import pytest

from heedful.emulator.clock import fingerprint

TABLES = ["050-clock", "051-ratios", "052-clock-rows", "054-own", "056-own-others"]
TABLES += ["044-forwards", "058-forwards"]
FOLDER = Path(__file__).parents[3] / "measurements" / "emulator"


@pytest.mark.parametrize("name", TABLES)
def test_a_changed_clock_remakes_its_tables(name):
    """python -m objects.clock, in tools: any change of the clock predicts every row anew."""
    assert f"clock {fingerprint()};" in (FOLDER / f"{name}.csv").read_text()


def table(name: str) -> list[dict[str, str]]:
    text = (FOLDER / f"{name}.csv").read_text()
    return list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))


def test_held_out_rows_are_predicted_within_the_bars_that_are_met():
    """Median 10 %, eight of ten within 15 %, none over 30 %, but for what is listed apart."""
    rows = table("052-clock-rows")
    held = [r for r in rows if r["role"] == "held out"]
    errors = sorted(abs(float(r["predicted"]) / float(r["published"]) - 1) for r in held)
    assert len(errors) > 200 and errors[len(errors) // 2] < 0.1
    assert sum(e <= 0.15 for e in errors) >= 0.8 * len(errors)
    assert sum(e > 0.3 for e in errors) <= 1 and errors[-1] < 0.35  # the shortest launch
    assert sum(r["role"] == "listed" for r in rows) <= 3


def test_the_one_row_that_is_wrong_by_more_than_30_percent_is_the_shortest_launch():
    """What docs/clock.md says of its cause: launches from half a millisecond are within 16 %."""
    errors = []
    for row in table("052-clock-rows"):
        products = 4 if " fwd " in row["object"] else 10
        work = products * int(row["batch"]) * int(row["heads"]) * int(row["length"]) ** 2
        work /= 2 if "causal" in row["object"] else 1
        error = abs(float(row["predicted"]) / float(row["published"]) - 1)
        if row["role"] != "listed":
            errors.append((128 * work / float(row["published"]) / 1e12, error))
    assert min(errors)[1] == max(error for _, error in errors) > 0.3
    assert max(error for seconds, error in errors if seconds >= 5e-4) < 0.16


def test_forwards_named_after_the_freeze_are_right_and_stand_to_aiter_s_as_predicted():
    """A ratio of two kernels on one machine within 8 %. docs/clock.md says what is not so."""
    assert {row["right"] for row in table("044-forwards")} == {"6 of 6"}
    assert not any(row["findings"] for row in table("044-forwards"))
    rows = [r for r in table("058-forwards") if r["kernel"].startswith("HipKittens D128")]
    errors = [abs(float(row["error of the ratio"].split()[0])) for row in rows]
    assert len(errors) == 12 and max(errors) < 8


def test_the_clock_is_frozen_by_its_mark():
    assert f"frozen as {fingerprint()} " in (FOLDER.parents[1] / "docs" / "clock.md").read_text()


def test_ratios_and_order_are_predicted_within_their_bars_and_the_null_model_is_beaten():
    """Eight of ten ratios within 8 %; the null model's median error is beaten by a third."""
    (row,) = (r for r in table("051-ratios") if r["pair"] == "all")
    assert float(row["within 8 %"].split()[0]) >= 80
    right, count = map(int, row["order"].split(" of "))
    assert right >= 0.99 * count > 400
    (row,) = (r for r in table("050-clock") if r["object"] == "all")
    own, null = (float(row[n].split()[0]) for n in ("median error", "null: median"))
    assert own <= null * 2 / 3
