"""Own emptying a host: drain and undrain with their schedule, and reaping idle sessions. May import migration,
snapshot, host and all layers below them; not agent. Sessions are moved and parked by commands that it starts, never by
calling the migration engine.
"""
