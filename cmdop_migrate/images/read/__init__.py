"""Read a checkpoint from the store: whole, lazily or to verify it, every byte authenticated. It may import
`images.format`, `images.store`, `storage` and `util`."""
