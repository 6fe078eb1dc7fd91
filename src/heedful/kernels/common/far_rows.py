"""Whether a call has rows far from 0, of which portable/statistics.py tells.

What says so is a word of its own: memory that holds it by chance, or since another call, makes a
call slower, and its results no worse, so that nobody has to clear it beforehand.
"""

import triton.language as tl

HAS_FAR_ROWS = tl.constexpr(0x46415221)
