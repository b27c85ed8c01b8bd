// Starts the page, or says what is missing. By itself, so that it runs when something is.

try {
  const { start } = await import("./app.js");
  await start();
} catch (error) {
  console.error(error);
  document.getElementById("trouble-why").textContent = error.message;
  document.getElementById("trouble").hidden = false;
}
