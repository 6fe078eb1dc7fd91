"""The backward, in three variants: `kernel`, `pair` and `wide`. May import `hopper.sm90`."""
