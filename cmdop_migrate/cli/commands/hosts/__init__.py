"""Hold the commands about hosts: their daemons, leases, relay, inventory and health."""
