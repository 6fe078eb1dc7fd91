"""Which problems tests draw, and what results are judged by."""
