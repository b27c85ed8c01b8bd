"""Capture and re-create the file layer of a session, and describe the host files it uses. It may import only the base
modules: chunks come and go through the ChunkSink and ChunkSource protocols."""
