"""Tests of calls on a GPU, down to a stand-in for its driver."""
