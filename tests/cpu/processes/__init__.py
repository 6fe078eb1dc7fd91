"""Tests of what lasts longer than a call: settings, threads, forks, first imports."""
