"""Raise the limit of open files of this process."""

from __future__ import annotations

import resource


def more_files(wanted: int) -> int:
    """Raise the limit to `wanted` open files, or as far as the system allows. Return how many of `wanted` it allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if soft == resource.RLIM_INFINITY else min(soft, wanted)
