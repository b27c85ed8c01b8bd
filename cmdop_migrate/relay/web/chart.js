// A move as a bar: its phases, where they happened, and how long the session was frozen.

// Phases on the source in which the session is frozen. On the target it is frozen in all phases but "memory", which
// follows the restore.
const FROZEN = new Set(["freeze", "reset", "dump", "capture", "upload", "commit"]);
const KINDS = {
  here: "on the source, running",
  still: "on the source, frozen",
  there: "on the target, frozen",
  behind: "running on the target",
};

// Return [name, kind, seconds] of each phase, in order.
export function bars(phases) {
  const found = Object.entries(phases).filter(([, seconds]) => typeof seconds === "number" && seconds >= 0);
  const here = found.filter(([name]) => name !== "there" && name !== "forget" && !name.startsWith("there."));
  const there = found.filter(([name]) => name.startsWith("there."));
  return [
    ...here.map(([name, seconds]) => [name, FROZEN.has(name) ? "still" : "here", seconds]),
    ...there.map(([name, seconds]) => [name, name === "there.memory" ? "behind" : "there", seconds]),
    ...found.filter(([name]) => name === "forget").map(([name, seconds]) => [name, "behind", seconds]),
  ];
}

export function chart(moved, open) {
  const details = element("details", { open });
  const frozen = typeof moved.frozen_s === "number" ? `, frozen for ${show(moved.frozen_s)}` : "";
  const text = `moved from ${moved.from} to ${moved.to} ${ago(moved.at)}${frozen}`;
  const found = bars(moved.phases ?? {});
  const total = found.reduce((sum, [, , seconds]) => sum + seconds, 0) || 1;
  const bar = element("span", { className: "phases", ariaHidden: "true" });
  for (const [name, kind, seconds] of found) {
    const part = element("i", { className: kind, title: `${name}: ${show(seconds)}` });
    part.style.flexGrow = seconds / total;
    bar.append(part);
  }
  const summary = element("summary", {}, element("span", { textContent: text }), bar);
  const table = element("table", {}, element("caption", { className: "hidden", textContent: "Phases of the move" }));
  for (const [name, kind, seconds] of found) {
    const key = element("i", { className: kind, title: KINDS[kind] });
    const head = element("th", { scope: "row" }, key, name);
    table.append(element("tr", {}, head, element("td", { textContent: show(seconds) })));
  }
  const legend = element("p", { className: "legend" });
  for (const kind of new Set(found.map(([, each]) => each))) {
    legend.append(element("span", {}, element("i", { className: kind }), KINDS[kind]));
  }
  details.append(summary, table, legend);
  return details;
}

function show(seconds) {
  return seconds < 1 ? `${Math.round(seconds * 1000)} ms` : `${seconds.toFixed(1)} s`;
}

function ago(at) {
  const seconds = Math.max(0, Date.now() / 1000 - at);
  if (seconds < 60) return "just now";
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ago`;
  return `on ${new Date(at * 1000).toLocaleDateString()}`;
}

function element(name, fields, ...children) {
  const made = Object.assign(document.createElement(name), fields);
  made.append(...children);
  return made;
}
