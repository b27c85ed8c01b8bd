"""Keep gauges and counters of one process, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Metric:
    """Describe one metric. `label` names the label by which its samples differ; empty means one sample only."""

    kind: Literal["gauge", "counter"]
    help: str
    label: str = ""


class Metrics:
    """Hold the values of a fixed set of metrics. A metric without a label has a sample, 0, from the start."""

    def __init__(self, prefix: str, metrics: Mapping[str, Metric]) -> None:
        """Begin the name of every metric in the text with `prefix`."""
        self._prefix, self._metrics = prefix, metrics
        self._values: dict[str, dict[str, float]] = {
            name: {} if metric.label else {"": 0.0} for name, metric in metrics.items()
        }

    def add(self, name: str, count: float = 1, label: str = "") -> None:
        """Add to a counter; `label` is the value of its label. Raise KeyError for an unknown name."""
        samples = self._values[name]
        samples[label] = samples.get(label, 0.0) + count

    def set(self, name: str, value: float) -> None:
        """Set a gauge. Raise KeyError for an unknown name."""
        self._values[name][""] = value

    def text(self) -> str:
        """Return all samples as a Prometheus collector reads them."""
        lines = []
        for name, metric in self._metrics.items():
            full = f"{self._prefix}_{name}"
            lines += [f"# HELP {full} {metric.help}", f"# TYPE {full} {metric.kind}"]
            for label, value in sorted(self._values[name].items()):
                labels = f'{{{metric.label}="{label}"}}' if metric.label else ""
                lines.append(f"{full}{labels} {value:.10g}")
        return "\n".join(lines) + "\n"


class MetricsFile(Metrics):
    """Write metrics to a file that a collector reads."""

    def __init__(self, prefix: str, metrics: Mapping[str, Metric], path: Path) -> None:
        super().__init__(prefix, metrics)
        self._path = path

    def write(self) -> None:
        """Replace the file atomically. Raise OSError if that fails."""
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(self.text(), encoding="ascii")
        temporary.replace(self._path)

    def remove(self) -> None:
        """Delete the file: a collector must not read values of a process that has ended."""
        self._path.unlink(missing_ok=True)
