"use strict";
// Makes every column title of a table with data-sortable a button that sorts.
(() => {
  const keyOf = (cell) => {
    const value = cell.dataset.value;
    return { text: value, number: value === "" || value === "None" ? NaN : Number(value.replace(/^(-?)inf$/, "$1Infinity")) };
  };

  // Missing numbers are last in either order.
  const compare = (a, b, sign, numeric) => {
    if (!numeric) return sign * a.text.localeCompare(b.text);
    if (Number.isNaN(a.number) || Number.isNaN(b.number)) return Number.isNaN(a.number) - Number.isNaN(b.number);
    return a.number === b.number ? 0 : sign * (a.number < b.number ? -1 : 1);
  };

  const sortBy = (table, heading) => {
    const column = heading.cellIndex;
    const numeric = heading.classList.contains("n");
    const before = heading.getAttribute("aria-sort");
    const now = before === null ? (numeric ? "descending" : "ascending") : before === "descending" ? "ascending" : "descending";
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", now);
    const body = table.tBodies[0];
    const rows = Array.from(body.rows, (row) => ({ row, key: keyOf(row.cells[column]) }));
    rows.sort((a, b) => compare(a.key, b.key, now === "ascending" ? 1 : -1, numeric));
    body.append(...rows.map((entry) => entry.row));
  };

  for (const table of document.querySelectorAll("table[data-sortable]")) {
    for (const heading of table.tHead.querySelectorAll("th")) {
      const button = document.createElement("button");
      button.type = "button";
      button.className = "sort";
      button.textContent = heading.textContent;
      button.addEventListener("click", () => sortBy(table, heading));
      heading.replaceChildren(button);
    }
  }
})();
