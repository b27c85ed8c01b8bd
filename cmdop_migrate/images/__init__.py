"""Store checkpoints as images: format (what an image is), write (make one), read (open one), store (catalog, index,
prune) and files (the file layer of a session).

It owns the image format, its keys and the layout of a checkpoint store. It may import `storage`, `util` and the base
modules (errors, log, clock, model), never `lease`, `criu`, `session` or an engine.
"""
