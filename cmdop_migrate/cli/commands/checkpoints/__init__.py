"""Hold the commands that make, restore, list and remove checkpoints, and those about the keys that seal them."""
