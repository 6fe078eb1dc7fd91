"""The references that every backend is checked against: a float64 oracle and a same-dtype eager
twin."""
