// Make the terminal's colours follow the page's, dark or light.

const DARK = { background: "#10151a", foreground: "#d7dee5", cursor: "#d7dee5", selectionBackground: "#33526b" };
const LIGHT = {
  background: "#ffffff", foreground: "#1d2429", cursor: "#1d2429", selectionBackground: "#b8d4ea",
  black: "#1d2429", red: "#b3261e", green: "#1a6e2e", yellow: "#7a5900", blue: "#1557a0", magenta: "#8a2b87",
  cyan: "#00677a", white: "#5b646b", brightBlack: "#5b646b", brightRed: "#c4342b", brightGreen: "#1f7d35",
  brightYellow: "#876300", brightBlue: "#1b66b8", brightMagenta: "#9c3899", brightCyan: "#007489", brightWhite: "#1d2429",
};

export function follow(terminal, signal) {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const set = () => (terminal.options.theme = dark.matches ? DARK : LIGHT);
  dark.addEventListener("change", set, { signal });
  set();
}
