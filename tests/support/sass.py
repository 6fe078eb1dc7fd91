"""What compiled kernels do in their loops, read from their assembly."""

from heedful.inspector.nvidia import disassemble, measure, parse_sass


def spills_over_keys(cubin: bytes) -> int:
    """Of the innermost loops with products, whichever unit makes them."""
    code, labels, branches = parse_sass(disassemble(cubin).text)
    loops = {(labels[to], at + 1) for at, to in branches if labels.get(to, at + 1) <= at}
    found = {bounds: measure(code[slice(*bounds)]) for bounds in loops}
    busy = {b for b, sass in found.items() if sass.wgmma or sass.counts["HMMA"]}
    inner = [b for b in busy if not any(b[0] <= c[0] and c[1] <= b[1] and b != c for c in busy)]
    assert inner
    return sum(found[bounds].spills for bounds in inner)
