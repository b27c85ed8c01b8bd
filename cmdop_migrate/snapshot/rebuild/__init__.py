"""Rebuild a session from a verified image: its files, its process tree with CRIU, its holder, and its memory.

Only `snapshot` uses this package.
"""
