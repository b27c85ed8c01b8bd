"""Provide a CRIU that works on this kernel: find one (every command), or fetch one into a private prefix (set-up,
`doctor --fix`)."""
