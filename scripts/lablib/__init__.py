"""Run several hosts on this machine, each in its own namespaces, with real servers (docs/internals/lab.md)."""
