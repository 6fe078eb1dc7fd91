"""Tests of the portable decode kernel."""
