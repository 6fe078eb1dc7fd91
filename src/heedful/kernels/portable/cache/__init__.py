"""What happens to a KV cache before attention. May import `portable.shared`."""
