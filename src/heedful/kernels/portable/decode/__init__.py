"""Few queries over many keys. May import `portable.cache` and `portable.shared`."""
