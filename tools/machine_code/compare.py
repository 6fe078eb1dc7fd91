"""Two records side by side."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from machine_code.digests import counts_digest, problem_of

# From the least to the most that can differ.
VERDICTS = ("same code", "same order", "same counts", "other counts", "missing", "error")
MOST_OPCODES = 6


@dataclass(frozen=True)
class Difference:
    """One kernel of both records.

    function: its name, and what its problem has. verdict: one of VERDICTS. said: what else differs.
    is_loop_same: the hot loop has the same instructions. is_worse: it spills more, or is no more.
    """

    key: str
    function: str
    verdict: str
    said: tuple[str, ...]
    is_worse: bool
    is_loop_same: bool = False


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[Difference]:
    """Each kernel of the problems that both records have, by target, array and problem.

    Raises ValueError for records that have no problem of an array in common.
    """
    sides = [_by_problem(each) for each in (before, after)]
    common = sides[0].keys() & sides[1].keys()
    arrays = [{array for array, _ in side} for side in sides]
    other = sorted((arrays[0] & arrays[1]) - {array for array, _ in common})
    if other:
        raise ValueError(f"the records are of different problems: {', '.join(other[:5])}")
    found = []
    for array, words in sorted(common):
        (_, first), (row, second) = (side[array, words] for side in sides)
        for place, (a, b) in enumerate(_pairs(first, second)):
            found.append(_difference(f"{row}.{place}", words, a, b))
    return found


Kernel = dict[str, Any]


def _by_problem(record: dict[str, Any]) -> dict[tuple[str, str], tuple[str, list[Kernel]]]:
    """The key of each problem and its kernels in their order. A problem goes by its values: its
    number moves where an array gains a row."""
    found: dict[tuple[str, str], tuple[str, list[Kernel]]] = {
        (row.rpartition("/")[0], words): (row, []) for row, words in record["rows"].items()
    }
    places = []
    for key, kernel in record["kernels"].items():
        row, place = problem_of(key, record["rows"])
        name = row.rpartition("/")[0], record["rows"].get(row)
        if name in found:
            places.append((int(place) if place != "-" else 0, name, kernel))
    for _, name, kernel in sorted(places, key=lambda each: each[0]):
        found[name][1].append(kernel)
    return found


def _pairs(
    first: list[Kernel], second: list[Kernel]
) -> Iterator[tuple[Kernel | None, Kernel | None]]:
    """Kernels in the same place; if a launch came or went, those of the same code first, then
    those that have the most opcodes in common."""
    if len(first) == len(second):
        yield from zip(first, second, strict=True)
        return
    ranked = sorted(
        ((_likeness(a, b), i, j) for i, a in enumerate(first) for j, b in enumerate(second)),
        key=lambda each: (-each[0], abs(each[1] - each[2])),
    )
    taken_a, taken_b = set(), set()
    for likeness, i, j in ranked:
        if likeness > 0 and i not in taken_a and j not in taken_b:
            taken_a.add(i)
            taken_b.add(j)
            yield first[i], second[j]
    yield from ((a, None) for i, a in enumerate(first) if i not in taken_a)
    yield from ((None, b) for j, b in enumerate(second) if j not in taken_b)


def _likeness(a: Kernel, b: Kernel) -> float:
    """1 for equal code, else the share of instructions whose opcodes both have."""
    if "error" in a or "error" in b:
        return float("error" in a and "error" in b)
    if a["code"] == b["code"]:
        return 1.0
    common = sum((Counter(a["opcodes"]) & Counter(b["opcodes"])).values())
    return common / (1 + max(sum(a["opcodes"].values()), sum(b["opcodes"].values())))


def _difference(
    key: str, row: str, a: dict[str, Any] | None, b: dict[str, Any] | None
) -> Difference:
    function = f"{(b or a or {}).get('function', '')} [{row}]"
    if a is None or b is None:
        said = f"only {'after' if a is None else 'before'}"
        return Difference(key, function, "missing", (said,), True)
    if "error" in a or "error" in b:
        said = tuple(
            f"{when}: {one['error'].strip().splitlines()[-1]}"
            for when, one in (("before", a), ("after", b))
            if "error" in one
        )
        return Difference(key, function, "error", said, "error" in b)
    said = []
    for what in ("registers", "spills"):
        for name, before in a[what].items():
            if b[what][name] != before:
                said.append(f"{what}: {name} {before} -> {b[what][name]}")
    for what in ("shared_bytes", "parameter_bytes"):
        if a[what] != b[what]:
            said.append(f"{what.replace('_', ' ')} {a[what]} -> {b[what]}")
    a, b = _alike(a, b)
    for what in ("opcodes", "loop"):
        if a[what] != b[what]:
            said.append(f"{what}: {_counts(a[what], b[what])}")
    if _verdict(a, b) == "other counts" and a["opcodes"] == b["opcodes"]:
        said.append("opcodes: as many, others")
    if a.get("loop_order") != b.get("loop_order") and "counts" not in a:
        said.append("loop in another order")
    is_worse = any(b["spills"][name] > before for name, before in a["spills"].items())
    is_loop_same = a["loop"] == b["loop"]
    return Difference(key, function, _verdict(a, b), tuple(said), is_worse, is_loop_same)


def _alike(a: Kernel, b: Kernel) -> tuple[Kernel, Kernel]:
    """Both as the lines of digests.py have them, if one is such a line."""
    if not ("counts" in a or "counts" in b):
        return a, b

    def line(kernel: Kernel) -> Kernel:
        totals = {what: {"": sum(kernel[what].values())} for what in ("opcodes", "loop")}
        return {**kernel, **totals, "counts": counts_digest(kernel)}

    return line(a), line(b)


def _verdict(a: Kernel, b: Kernel) -> str:
    if a["code"] == b["code"]:
        return VERDICTS[0]
    if a["order"] == b["order"]:
        return VERDICTS[1]
    return VERDICTS[2] if counts_digest(a) == counts_digest(b) else VERDICTS[3]


def _counts(a: dict[str, int], b: dict[str, int]) -> str:
    """Instructions in all, and the opcodes whose counts differ most."""
    delta = {name: b.get(name, 0) - a.get(name, 0) for name in a.keys() | b.keys()}
    most = sorted((n for n in delta if delta[n]), key=lambda n: (-abs(delta[n]), n))
    names = ", ".join(f"{name} {delta[name]:+}".strip() for name in most[:MOST_OPCODES])
    more = f", {len(most) - MOST_OPCODES} more" if len(most) > MOST_OPCODES else ""
    return f"{sum(a.values())} -> {sum(b.values())} ({names}{more})"


def table(found: list[Difference]) -> str:
    """How many kernels of each array and target have which verdict, as Markdown."""
    counts: dict[str, Counter] = {}
    for each in found:
        counts.setdefault(each.key.rpartition("/")[0], Counter())[each.verdict] += 1
        counts[each.key.rpartition("/")[0]]["same loop"] += each.is_loop_same
        counts[each.key.rpartition("/")[0]]["more spills"] += each.is_worse
    columns = (*VERDICTS, "same loop", "more spills")
    lines = [f"| array | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name, by in sorted(counts.items()):
        lines.append(f"| {name} | {' | '.join(str(by[c] or '') for c in columns)} |")
    return "\n".join(lines)


def details(found: list[Difference], every: bool = False) -> str:
    """A line for each kernel whose counts or resources differ, or for all that are not equal."""
    return "\n".join(
        f"{each.key} {each.function}: {'; '.join((each.verdict, *each.said))}"
        for each in found
        if each.said or (every and each.verdict != VERDICTS[0])
    )
