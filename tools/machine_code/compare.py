"""Two records side by side."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

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
    """Each kernel of the problems that both records have.

    Raises ValueError for records of other problems.
    """
    rows = before["rows"]
    other = [key for key in rows.keys() & after["rows"].keys() if rows[key] != after["rows"][key]]
    if other:
        raise ValueError(f"the records are of different problems: {', '.join(other[:5])}")
    found = []
    for key in sorted(before["kernels"].keys() | after["kernels"].keys()):
        row = key if key in rows else key.rpartition(".")[0]
        if row in rows and row in after["rows"]:
            pair = before["kernels"].get(key), after["kernels"].get(key)
            found.append(_difference(key, rows[row], *pair))
    return found


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
    for what in ("opcodes", "loop"):
        if a[what] != b[what]:
            said.append(f"{what}: {_counts(a[what], b[what])}")
    if a.get("loop_order") != b.get("loop_order"):
        said.append("loop in another order")
    is_worse = any(b["spills"][name] > before for name, before in a["spills"].items())
    is_loop_same = a["loop"] == b["loop"]
    return Difference(key, function, _verdict(a, b), tuple(said), is_worse, is_loop_same)


def _verdict(a: dict[str, Any], b: dict[str, Any]) -> str:
    for verdict, what in zip(VERDICTS, ("code", "order", "opcodes"), strict=False):
        if a[what] == b[what]:
            return verdict
    return "other counts"


def _counts(a: dict[str, int], b: dict[str, int]) -> str:
    """Instructions in all, and the opcodes whose counts differ most."""
    delta = {name: b.get(name, 0) - a.get(name, 0) for name in a.keys() | b.keys()}
    most = sorted((n for n in delta if delta[n]), key=lambda n: (-abs(delta[n]), n))
    names = ", ".join(f"{name} {delta[name]:+}" for name in most[:MOST_OPCODES])
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
