"""The forward, the merge of partial results, and probabilities. May import `portable.shared`."""
