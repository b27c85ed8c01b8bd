"""Provide the digest function of the project: BLAKE3, also keyed and for key derivation.

Chunk ids need one keyed digest per chunk, at 2 to 3 GB per CPU second (docs/decisions/0001-dependencies.md). Every
other module takes it from here, so that this is the only place that knows which library computes it."""

from __future__ import annotations

from blake3 import blake3

__all__ = ["blake3"]
