"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const names = Object.keys(data.lines);
const find = (id) => document.getElementById(id);
const KEPT = 3; // equal lines that are shown around what differs

// One line of a script with its number, or nothing after the end of a block.
function cell(side, name, i, end) {
  if (i >= end) return "<span></span><code></code>";
  return `<span>${i + 1}</span><code class="${side}">${data.lines[name][i]}</code>`;
}

// The rows of a block. Equal lines that are not next to a difference are folded.
function rows(left, right, [kind, i, iEnd, j, jEnd]) {
  const found = [];
  for (; i < iEnd || j < jEnd; i++, j++) {
    const cells = cell("a", left, i, iEnd) + cell("b", right, j, jEnd);
    found.push(`<div class="row ${kind}">${cells}</div>`);
  }
  if (kind !== "equal" || found.length <= 3 * KEPT) return found.join("");
  const inside = found.splice(KEPT, found.length - 2 * KEPT);
  const fold = `<details><summary>${inside.length} identical lines</summary>${inside.join("")}</details>`;
  found.splice(KEPT, 0, fold);
  return found.join("");
}

// The address names the pair: ?left=dapo&right=cispo
const address = new URLSearchParams(location.search);
const left = address.get("left") ?? "grpo";
const right = address.get("right") ?? "sapo";
for (const [id, name] of [["left", left], ["right", right]]) {
  find(id).append(...names.map((each) => new Option(each, each)));
  find(id).value = name;
  find(id).onchange = () => find(id).form.submit();
}
document.title = `${left} and ${right}, side by side`;
const blocks = data.blocks[`${left},${right}`];
find("diff").innerHTML = blocks
  ? blocks.map((block) => rows(left, right, block)).join("")
  : "The address names a script that does not exist.";
