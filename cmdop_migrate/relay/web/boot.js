// Start the page, or show what is missing. A module of its own, so that it runs when another one cannot be loaded.

try {
  const { start } = await import("./app.js");
  await start();
} catch (error) {
  console.error(error);
  document.getElementById("trouble-why").textContent = error.message;
  document.getElementById("trouble").hidden = false;
}
