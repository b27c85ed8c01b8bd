"""Checkpoint, restore and fork sessions; list, verify and prune checkpoints.

This package owns the path from a running session to a checkpoint in the store (`checkpoint.py`, `capture/`), the path
back (`restore.py`, `rebuild/`), the proof of a checkpoint by a trial restore, and the commands on stored checkpoints.
It may import `host`, `session`, `images`, `criu`, `preflight` and the packages below them, not `migration`.
"""
