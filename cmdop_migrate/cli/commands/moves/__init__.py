"""Hold the commands that move sessions between hosts, or evict them from this one."""
