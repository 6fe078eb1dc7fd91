"""The forward, and how partial results are merged. May import `portable.shared`."""
