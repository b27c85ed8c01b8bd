"""Restore memory lazily: fill the pages of a running session on demand through userfaultfd, and prefetch the others."""
