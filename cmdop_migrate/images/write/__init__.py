"""Write one checkpoint: take pages and blobs, recognise what did not change, seal the rest into packs, upload them,
publish the manifest. It may import `images.format`, `images.read` (the parent's table), `images.store`, `storage` and
`util`."""
