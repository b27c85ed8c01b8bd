"""The virtual machines of scripts/test-vm: what they are made of, how they come up and go (docs/internals/testing.md)."""
