"""A lab: several hosts on this machine, each in namespaces of its own, with real servers beside them (docs/internals/lab.md)."""
