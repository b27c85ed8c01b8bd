"""Edit CRIU's image files, one module for each kind of state that CRIU alone does not restore. All of them read and
write images with `criu/protobuf.py`."""
