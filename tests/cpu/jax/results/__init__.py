"""What calls return besides their output."""
