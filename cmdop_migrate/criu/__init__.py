"""Run CRIU: find or install it, build its requests, exchange messages with it, serve its memory pages, edit its images
and explain its failures. This package owns everything that knows CRIU's formats and behaviour, and the dump guard and
the ptrace work that make up for what CRIU cannot do. It may import `holder`, `util`, `log` and `errors`; it knows
nothing of stores, leases or checkpoints, which `snapshot` combines with it."""
