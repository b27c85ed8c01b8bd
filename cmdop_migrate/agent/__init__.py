"""Own the agent, one daemon per host: it renews leases, watches deadlines and VM pauses, recovers interrupted
migrations, and supervises the relay link and the fork server. May import migration, snapshot, gateway, host and all
layers below them; not drain.
"""
