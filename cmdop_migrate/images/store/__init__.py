"""Manage the checkpoints in a store: catalog, indexes and their cache, upload marks, deletion marks, prune, manifests
of forks. It may import `images.format`, `storage` and `util`."""
