"""Tests of the semantics of instructions."""
