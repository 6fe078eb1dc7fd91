"""Calls of frameworks, and what they are to give."""
