"use strict";
(() => {
  const units = { B: 1, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30 };
  // What a cell sorts by: the number it begins with, in bytes if it is a size, else its text.
  const value = (cell) => {
    const text = cell.textContent.replace(/^[▲△]\s*/, "");
    // 50×64 is a name, not the number 50.
    if (cell.cellIndex < 2 || cell === cell.parentNode.lastElementChild) return text;
    const number = parseFloat(text) * (units[text.split(" ")[1]] ?? 1);
    return Number.isNaN(number) ? Infinity : number;
  };
  const before = (a, b) =>
    typeof a === "string"
      ? a.localeCompare(b, undefined, { numeric: true })
      : a === b ? 0 : a < b ? -1 : 1;

  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const button = document.createElement("button");
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
        const keyed = [...table.tBodies[0].rows].map((row) => [value(row.cells[column]), row]);
        // Cells without a value stay at the end in either direction.
        keyed.sort(([a], [b]) =>
          a === Infinity || b === Infinity ? before(a, b) : sign * before(a, b));
        table.tBodies[0].append(...keyed.map(([, row]) => row));
      });
    });
  }

  const filter = document.getElementById("filter");
  const onlyLost = document.getElementById("only-lost");
  const count = document.getElementById("count");
  const rows = [...document.querySelectorAll("table.sortable tbody tr")];
  const verdicts = { "▲": "lost", "△": "near", "–": "" };
  for (const row of rows) row.className = verdicts[row.cells[2].textContent[0]] ?? "won";
  const names = rows.map((row) =>
    [0, 1, row.cells.length - 1].map((i) => row.cells[i].textContent).join(" ").toLowerCase());
  const apply = () => {
    // An x is what a keyboard has for ×.
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean)
      .map((word) => word.replace(/(\d)x(?=\d|$)/g, "$1×"));
    let shown = 0;
    rows.forEach((row, i) => {
      const fits = words.every((word) => names[i].includes(word));
      row.hidden = !(fits && (!onlyLost.checked || row.classList.contains("lost")));
      shown += row.hidden ? 0 : 1;
    });
    count.textContent = shown === rows.length ? "" : `${shown} of ${rows.length} cells`;
    if (count.textContent) {
      for (const group of document.querySelectorAll("details.group")) {
        group.open = group.querySelector("tbody tr:not([hidden])") !== null;
      }
    }
  };
  filter.addEventListener("input", apply);
  onlyLost.addEventListener("change", apply);
})();
