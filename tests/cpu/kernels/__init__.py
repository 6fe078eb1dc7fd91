"""Tests of device code, interpreted or as threads of Python."""
