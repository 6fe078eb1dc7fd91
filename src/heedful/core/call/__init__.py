"""One call: its arguments by name, checked, as an `AttentionProblem`. May import `core.base`."""
