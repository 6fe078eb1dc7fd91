"""Parts of the forward that only fp8 inputs need. May import `hopper.sm90`."""
