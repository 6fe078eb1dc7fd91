"""What a call makes of inputs that are no numbers: NaN where they are seen, nothing elsewhere."""

from itertools import product

import torch

import heedful

NAN = float("nan")
# Queries and keys: less than a vector of a CPU, about one, about a tile, several tiles.
SIZES = [(1, 1), (4, 3), (4, 4), (1, 15), (5, 16), (3, 17), (20, 7), (40, 150)]
# Which tensor has the NaN, and how much of one of its rows.
PLACES = list(product("qk", (1, 16)))


def seen(size: tuple[int, int], causal: bool) -> torch.Tensor:
    """Which keys a query sees, bool (Sq, Sk)."""
    everything = torch.ones(size, dtype=torch.bool)
    return everything.tril(size[1] - size[0]) if causal else everything


def assert_passed_on(
    size: tuple[int, int],
    place: tuple[str, int],
    backend: str | None,
    causal: bool = False,
    grad: bool = False,
    lse: bool = False,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    dim: int = 16,
    **more,
) -> None:
    """A NaN in a query or in a key, of the second entry and head: every row that sees it is NaN,
    with its log-sum-exp; all others are numbers; rows without keys are 0 and -inf."""
    name, width = place
    values = torch.Generator().manual_seed(0)
    shapes = [(3, n, 2, dim) for n in (size[0], size[1], size[1])]
    q, k, v = (torch.randn(shape, generator=values).to(dtype) for shape in shapes)
    # The last query, the first key: under a causal mask it is some rows' only one.
    row = (1, size[0] - 1 if name == "q" else 0, 1)
    (q if name == "q" else k)[row][:width] = NAN
    q, k, v = (x.to(device).requires_grad_(grad) for x in (q, k, v))
    made = heedful.flash_attn_func(q, k, v, causal=causal, backend=backend, return_lse=lse, **more)
    out, sums = made if lse else (made, None)
    visible = seen(size, causal)
    bad = torch.zeros(out.shape[:-1], dtype=torch.bool)
    bad[1, :, 1] = visible[:, 0] if name == "k" else False
    if name == "q":
        bad[row] = bool(visible[row[1]].any())
    none = ~visible.any(1)
    assert torch.equal(out.detach().isnan().cpu(), bad[..., None].expand(out.shape))
    assert (out.detach()[:, none] == 0).all()
    if sums is not None:
        sums = sums.detach().cpu().transpose(1, 2)
        assert torch.equal(sums.isnan(), bad)
        assert (sums[:, none] == -torch.inf).all() or "sink" in more
