"""Restore terminals as CRIU alone does not: controlling terminals, foreground groups, /dev/tty and their owners."""
