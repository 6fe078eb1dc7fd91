"""dQ: the warpgroup that computes it, its float32 sums, and the epilogue that reads them. May
import `hopper.backward` and `hopper.sm90`."""
