"""Tests of arrays that say which keys a query sees."""
