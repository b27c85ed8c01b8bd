"""Explain why CRIU failed: tables of known log messages with their cause and fix, and the search in a log."""
