"""Define the metrics that the agent exports."""

from __future__ import annotations

from pathlib import Path

from cmdop_migrate.util.metrics import Metric, MetricsFile

METRICS = {
    "sessions": Metric("gauge", "Live sessions of this host."),
    "sessions_unsure": Metric("gauge", "Live sessions whose lease could not be renewed at the last try."),
    "holders_silent": Metric("gauge", "Holders that did not take the agent's last message."),
    "idle_seconds_max": Metric("gauge", "Idle time of the session that has been idle for longest."),
    "renew_seconds": Metric("gauge", "Duration of the last round of renewals."),
    "renewals_total": Metric("counter", "Leases renewed."),
    "renewal_failures_total": Metric("counter", "Renewals that were not answered, or not with a lease."),
    "superseded_total": Metric("counter", "Incarnations killed because another took over."),
    "host_name_held": Metric("gauge", "1 if this installation holds its host name."),
    "round_failures_total": Metric("counter", "Rounds of the agent that ended in an error."),
}


def agent_metrics(run_dir: Path) -> MetricsFile:
    """Return the agent's metrics, to be written to `metrics.prom` in `run_dir`."""
    return MetricsFile("cmdop_migrate", METRICS, run_dir / "metrics.prom")
