"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const names = Object.keys(data.lines);
const find = (id) => document.getElementById(id);
const FEW = 3; // equal lines that stay visible between two differences

// A script's lines from i to the end of a block, with their numbers.
function lines(side, name, i, end) {
  const texts = data.lines[name].slice(i, end);
  return texts.map((text, k) => `<div class="${side}"><span>${i + k + 1}</span><code>${text}</code></div>`).join("");
}

// All left lines of a block, then all right ones: the style puts them beside each other.
function block(left, right, [kind, i, iEnd, j, jEnd], number) {
  const both = lines("a", left, i, iEnd) + lines("b", right, j, jEnd);
  if (kind !== "equal") return `<div class="block change" id="change-${number}">${both}</div>`;
  const equal = `<div class="block">${both}</div>`;
  if (iEnd - i <= FEW) return equal;
  return `<details><summary>${iEnd - i} equal lines</summary>${equal}</details>`;
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
  ? blocks.map((each, number) => block(left, right, each, number)).join("")
  : "The address names a script that does not exist.";

// n and p: a jump puts a difference at its scroll margin, so the next one is the first below that.
const changes = [...document.querySelectorAll(".change")];
const below = (change) => change.getBoundingClientRect().top - parseFloat(getComputedStyle(change).scrollMarginTop);
document.onkeydown = (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("select")) return;
  let change;
  if (event.key === "n") change = changes.find((each) => below(each) > 2);
  if (event.key === "p") change = changes.findLast((each) => below(each) < -2);
  if (change) location.replace(`#${change.id}`);
};
