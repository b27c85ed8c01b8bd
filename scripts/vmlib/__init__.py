"""Build, start and stop the virtual machines of scripts/test-vm (docs/internals/testing.md)."""
