"""Capture a running session: checks before the freeze, the CRIU dump, the changed files, and the commit to its lease.

Only `snapshot` uses this package, except for the checks and the pre-copy rounds, which `migration` uses too.
"""
