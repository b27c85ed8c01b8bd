"""The virtual machines of scripts/test-vm: what they are made of, how they come up, and how they go (docs/testing.md)."""
