"""Hold small helpers without domain knowledge: files, processes, threads, progress, fault points.

Each module may import log, events, clock, model, units and errors, and the standard library. The modules that the
holder loads (atomic, trash, trusted_file) import the standard library only."""
