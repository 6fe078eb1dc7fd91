"""Frameworks that run heedful where their users pass a name. Importing this imports none of
them."""
