"""The clock: small kernels with known counts, launches, planted changes, its tables."""
