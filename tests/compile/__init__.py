"""Tests of compiled kernels, for targets that are not here."""
