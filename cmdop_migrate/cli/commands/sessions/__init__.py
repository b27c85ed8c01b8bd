"""Hold the commands that start, list, use and end sessions."""
