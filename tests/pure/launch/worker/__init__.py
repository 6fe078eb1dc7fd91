"""Tests of the processes that compile: their channel, what they answer and how they end."""
