"""Find out before a dump or a move whether it can work: facts about hosts and sessions, rules that turn facts into
findings, and the plan that runs all rules. Rules have no side effects. This package may import `util`, `units` and
`errors`; it knows nothing of CRIU's formats, stores or leases: `host`, `snapshot` and `migration` gather those facts
for it."""
