"""Turn facts into findings: one function for each check, without side effects."""
