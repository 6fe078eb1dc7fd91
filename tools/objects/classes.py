"""The class of each finding in a shipped object: our rule, reliance on timing, harmless, open."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from heedful.emulator import Finding
from objects.rows import Row

OURS, TIMING, HARMLESS, OPEN = "ours", "timing", "harmless", "open"


@dataclass(frozen=True)
class Classed:
    """Findings of one class and reason: how many, in which objects, and the first pair."""

    kind: str
    what: str
    objects: tuple[str, ...]
    count: int
    pair: str

    def plus(self, other: Classed) -> Classed:
        """Both together, with this one's pair."""
        names = tuple(dict.fromkeys(self.objects + other.objects))
        return replace(self, objects=names, count=self.count + other.count)

    def line(self) -> list[str]:
        """The cells of its row."""
        names = self.objects
        shown = names[0] if len(names) == 1 else f"{len(names)}, {names[0]} first"
        return [self.kind, self.what, shown, str(self.count), self.pair]


@dataclass(frozen=True)
class _Rule:
    kind: str
    finding: str
    message: str
    what: str
    objects: str = ""


# The first that fits a finding's kind and text, and the object's chip and file.
_RULES = (
    _Rule(
        OURS,
        "wait-states",
        "^m0 read",
        "no wait state between m0 and the load to LDS that reads it; the ISA guide asks for 1",
    ),
    _Rule(
        OURS,
        "wait-states",
        "^scalar from a vector.* v_cndmask",
        "a mask from v_cmp read by v_cndmask after 0 or 1 of the 2 wait states that LLVM inserts; "
        "mostly 1, as if a mask needed no more",
    ),
    _Rule(
        OURS,
        "wait-states",
        "^scalar from a vector",
        "a scalar from a vector instruction read by another after 0 or 1 of 2 wait states",
    ),
    _Rule(
        OURS,
        "wait-states",
        "^vector result read by (a lane swap|an MFMA)",
        "the result of a lane swap read by a lane swap or an MFMA after 1 of 2 wait states",
    ),
    _Rule(
        TIMING,
        "wait-states",
        "^MFMA result read",
        "the result of an MFMA read after 5 to 10 of 11, or of 8, wait states: right only if a "
        "branch or other instructions in between take longer than one state each",
    ),
    _Rule(
        TIMING,
        "lds-race|order",
        "",
        "the loads for the second tile of queries overtake waves that still read the first tile's "
        "last keys and values: no barrier is between, and with a wave that lags outputs are wrong",
        "gfx950/fmha_v3_fwd/fwd_hd128_bf16_causal",
    ),
    _Rule(
        HARMLESS,
        "lds-race",
        r"(buffer_load_dword v\d+, s\[\d+:\d+\], 0 idxen lds).*\1",
        "all waves load the same LSE and D to the same place in LDS: the same bytes twice",
        "fmha_v3_bwd",
    ),
    _Rule(
        TIMING,
        "lds-race|order",
        "",
        "loads to LDS go over keys or values that another wave has yet to read: outputs are wrong "
        "if the loads land at once and a wave lags",
        "gfx950/fmha_v3_fwd/fwd_(hd192|hd128_fp8)",
    ),
    _Rule(
        OPEN,
        "lds-race",
        "ds_write_b32.*ds_read_b128",
        "dS is written where another wave reads the dS before it, with no barrier between: right "
        "in every order that was tried",
        "fmha_v3_bwd",
    ),
    _Rule(
        TIMING,
        "waitcnt",
        "ds_read_b64_tr_b8",
        "V is multiplied after s_waitcnt lgkmcnt(8) where 8 reads of it are outstanding, 4 too "
        "many, so that an MFMA may read registers before they are loaded",
        "gfx950/fmha_v3_fwd/fwd_hd128_fp8",
    ),
    _Rule(
        TIMING,
        "waitcnt",
        "buffer_load_dword",
        "page numbers are read before a wait for their load (the count is right only where more "
        "loads follow); with the load's old value the outputs are wrong",
        "/(pa|mla)/",
    ),
)


def classify(row: Row, findings: Sequence[Finding]) -> list[Classed]:
    """Every finding with its class; what no rule knows is open."""
    name = f"{row.chip}/{row.file.rsplit('/', 1)[-1]}"
    found: dict[tuple[str, str], Classed] = {}
    for f in findings:
        kind, what = OPEN, f"{f.kind}: {f.message.split(':')[0].split('[')[0]}"
        for rule in _RULES:
            text = f"{f.message} {f.instruction} {f.other}"
            fits = re.fullmatch(rule.finding, f.kind) and re.search(rule.message, text)
            if fits and re.search(rule.objects, f"{row.chip}/{row.file}"):
                kind, what = rule.kind, rule.what
                break
        one = Classed(kind, what, (name,), 1, _pair(f))
        known = found.get((kind, what))
        found[kind, what] = known.plus(one) if known else one
    return list(found.values())


def _pair(finding: Finding) -> str:
    """Both instructions without their lines, in the order in which they were executed."""
    texts = [t for t in (finding.other, finding.instruction) if t]
    return "; ".join(re.sub(r"^line \d+: ", "", t) for t in texts)
