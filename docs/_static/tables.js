// On a phone, tables of three columns and more are cards: each cell is named by the heading of its column.
for (const table of document.querySelectorAll(".bd-article table")) {
  const headings = [...table.querySelectorAll("thead th")].map((cell) => cell.textContent.trim());
  if (headings.length < 3) continue;
  table.classList.add("cards");
  for (const row of table.tBodies[0].rows) {
    [...row.cells].forEach((cell, column) => column && (cell.dataset.heading = headings[column]));
  }
}
