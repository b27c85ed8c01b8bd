"""Define the metrics that the relay exports."""

from __future__ import annotations

from cmdop_migrate.util.metrics import Metric, Metrics

METRICS = {
    "hosts": Metric("gauge", "Hosts connected."),
    "clients": Metric("gauge", "Clients connected."),
    "connections": Metric("gauge", "Connections, admitted or not yet."),
    "routes": Metric("gauge", "Sessions that can be reached."),
    "channels": Metric("gauge", "Channels between clients and sessions."),
    "waiting": Metric("gauge", "Channels whose session cannot be reached at the moment."),
    "queued_bytes": Metric("gauge", "Bytes queued for connections that do not read them."),
    "frames_total": Metric("counter", "Frames received."),
    "bytes_total": Metric("counter", "Bytes of frames received."),
    "admitted_total": Metric("counter", "Connections admitted."),
    "asked_total": Metric("counter", "Questions to the lease store."),
    "silent_total": Metric("counter", "Questions that the lease store did not answer."),
    "refused_total": Metric("counter", "Refusals, by reason.", label="code"),
}


def relay_metrics() -> Metrics:
    """Return the relay's metrics, which it serves at `/metrics`."""
    return Metrics("cmdop_migrate_relay", METRICS)
