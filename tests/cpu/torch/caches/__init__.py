"""Tests of calls over a KV cache."""
