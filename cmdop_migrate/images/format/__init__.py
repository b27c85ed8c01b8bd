"""Define the image format: names, keys, sealing, chunks, packs, page tables, manifests. It performs no request to a
store; it may import only the base modules."""
