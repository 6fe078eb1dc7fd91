"""Gradients of queries, keys, values, biases and sinks. May import `portable.shared`."""
