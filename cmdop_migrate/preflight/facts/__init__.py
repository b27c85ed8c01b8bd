"""Read facts from /proc and the kernel, and define those that other packages gather. Nothing here decides anything."""
