"""Tests of the oracle, its twin and the error budget."""
