"""What `heedful validate` reads of an AMD GPU while something runs: files of the Linux kernel."""

import threading
import time

import pytest

from heedful.validation import sensors

FILES = {
    "freq1_input": "1312000000\n",
    "freq2_input": "1300000000\n",
    "power1_average": "743000000\n",
    "power1_input": "1000000\n",
    "temp2_input": "71500\n",
    "temp1_input": "20000\n",
    "power1_cap": "750000000\n",
}
ALL = {"clock_mhz": 1312.0, "memory_mhz": 1300.0, "power_w": 743.0, "temperature_c": 71.5}


@pytest.fixture
def place(tmp_path):
    folder = tmp_path / "0000:05:00.0" / "hwmon" / "hwmon3"
    folder.mkdir(parents=True)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


def test_a_device_has_the_first_of_its_folders(place, tmp_path):
    assert sensors.folder("0000:05:00.0", tmp_path) == place
    place.with_name("hwmon2").mkdir()
    place.with_name("other").mkdir()
    assert sensors.folder("0000:05:00.0", tmp_path) == place.with_name("hwmon2")
    assert sensors.folder("0000:06:00.0", tmp_path) is None


@pytest.mark.parametrize(
    ("gone", "changed"),
    [
        ((), {}),
        # Where a GPU has no mean, its power now; where the core has no sensor, the edge's.
        (("power1_average", "temp2_input"), {"power_w": 1.0, "temperature_c": 20.0}),
        (("freq1_input", "temp1_input"), {"clock_mhz": None}),
        (("power1_average", "power1_input"), {"power_w": None}),
        (tuple(FILES), dict.fromkeys(ALL)),
    ],
)
def test_a_reading_is_of_the_first_file_there_is_in_units_for_people(place, gone, changed):
    for name in gone:
        (place / name).unlink()
    want = {name: value for name, value in (ALL | changed).items() if value is not None}
    assert sensors.reading(place) == pytest.approx(want)
    assert sensors.cap_w(place) == (None if "power1_cap" in gone else pytest.approx(750))


def test_a_file_without_a_number_is_one_that_is_not_there(place):
    (place / "power1_average").write_text("N/A\n")
    (place / "power1_cap").write_text("")
    assert sensors.reading(place)["power_w"] == pytest.approx(1.0)
    assert sensors.cap_w(place) is None


def test_samples_have_their_seconds_and_end_with_what_is_watched(place):
    began = time.perf_counter()
    with pytest.raises(RuntimeError, match="what ran"), sensors.sampled(place) as samples:
        (thread,) = (t for t in threading.enumerate() if t.name == "heedful-sensors")
        assert thread.daemon
        while len(samples) < 3:
            time.sleep(0.001)
        raise RuntimeError("what ran")
    taken = time.perf_counter() - began
    assert not thread.is_alive()
    times = [sample.pop("seconds") for sample in samples]
    assert times == sorted(set(times)) and times[0] > 0 and times[-1] <= taken
    assert all(sample == pytest.approx(ALL) for sample in samples)


def test_without_a_folder_there_are_no_samples_and_no_thread():
    with sensors.sampled(None) as samples:
        assert "heedful-sensors" not in {t.name for t in threading.enumerate()}
    assert samples == []


def test_a_summary_has_the_least_the_median_and_the_largest_of_what_was_read():
    samples = [
        {"seconds": 1.0, "clock_mhz": 5.0, "power_w": 3.0},
        {"seconds": 2.0, "clock_mhz": 1.0},
        {"seconds": 3.0, "clock_mhz": 9.0, "power_w": 1.0},
        {"seconds": 4.0, "clock_mhz": 6.0},
    ]
    assert sensors.summary(samples) == {
        "clock_mhz": {"low": 1.0, "median": 5.5, "high": 9.0},
        "power_w": {"low": 1.0, "median": 2.0, "high": 3.0},
    }
    assert sensors.summary([]) == {}


NODES = {
    "0": "cpu_cores_count 96\ngfx_target_version 0\n",
    "1": "simd_count 1216\n\ngfx_target_version 90402\n",
    "2": "gfx_target_version 90500\n",
    "3": "gfx_target_version 110003\n",
    "4": "no fact",
    "5": "gfx_target_version many\n",
    "6": "gfx_target_version 90010\n",
}


def test_gpus_are_the_nodes_that_have_an_architecture(tmp_path):
    """Steps are hexadecimal digits. A node that cannot be read is none."""
    for name, text in NODES.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "properties").write_text(text)
    (tmp_path / "7").mkdir()
    assert sensors.gpus(tmp_path) == ["gfx942", "gfx950", "gfx1103", "gfx90a"]
    assert sensors.gpus(tmp_path / "none") == []


def test_the_rocm_is_that_of_its_usual_folder_unless_another_is_named(tmp_path, monkeypatch):
    monkeypatch.delenv("ROCM_PATH", raising=False)
    asked = []
    monkeypatch.setattr(sensors.Path, "read_text", lambda self: asked.append(str(self)) or "7\n")
    assert sensors.rocm_version() == "7"
    assert asked == ["/opt/rocm/.info/version"]
