"""Decide which host may run a session: leases with fencing tokens over a compare-and-swap register (SQLite, S3, etcd,
memory). It may import `storage` (for its S3 client and addresses) and the base modules. Decisions are pure (rules.py);
the timing proof is in margins.py."""
