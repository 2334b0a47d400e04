"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const names = Object.keys(data.scripts);
const find = (id) => document.getElementById(id);
const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;");
const file = (name) => name.replace(".", "/") + ".py";
const KEPT = 3; // equal lines that are shown around what differs
let shown = "";

// ------------------------------------------------------------------------------------------ the rows

function rowsOf(left, right) {
  const swapped = data.pairs[`${right},${left}`] ?? data.scripts[left].words.map((_, i) => [i, i]);
  return data.pairs[`${left},${right}`] ?? swapped.map(([i, j, lefts, rights]) => [j, i, rights, lefts]);
}

function cell(side, name, i, marked = []) {
  if (i === null) return `<span class="none"></span><code class="none"></code>`;
  const { words, first } = data.scripts[name];
  const html = words[i].map((word, k) => (marked.includes(k) ? `<mark>${word}</mark>` : word)).join("");
  return `<span class="${side}">${first + i}</span><code class="${side}">${html}</code>`;
}

// All but the lines next to a difference go into one that opens.
function folded(rows, isStart, isEnd) {
  const head = isStart ? 0 : KEPT;
  const end = rows.length - (isEnd ? 0 : KEPT);
  if (end - head <= KEPT) return rows;
  const inside = rows.slice(head, end);
  const fold = `<details><summary>${inside.length} equal lines</summary>${inside.join("")}</details>`;
  return [...rows.slice(0, head), fold, ...rows.slice(end)];
}

function diff(left, right) {
  const parts = [];
  let same = []; // equal rows since the last difference
  let changed = 0;
  for (const [i, j, lefts, rights] of rowsOf(left, right)) {
    const cells = cell("a", left, i, lefts) + cell("b", right, j, rights);
    if (i !== null && j !== null && !lefts) {
      same.push(`<div class="row same">${cells}</div>`);
      continue;
    }
    parts.push(...folded(same, parts.length === 0, false), `<div class="row changed">${cells}</div>`);
    changed += (i !== null) + (j !== null);
    same = [];
  }
  parts.push(...folded(same, parts.length === 0, true));
  find("diff").innerHTML = parts.join("");
  find("count").textContent = `${changed} changed lines`;
}

// ----------------------------------------------------------------------------------------- the cards

function card(side, name) {
  const script = data.scripts[name];
  const parent = data.parents[name];
  const items = script.differences.map((text) => `<li><a class="ref">${escaped(text)}</a></li>`);
  const list = parent ? `<p>Differs from ${file(parent)} only in:</p><ol>${items.join("")}</ol>` : "";
  const notes = script.notes.map((text) => `<p>${escaped(text)}</p>`).join("");
  const title = `<h2>${file(name)}: ${escaped(script.title)}</h2>`;
  const objective = `<pre>${escaped(script.objective)}</pre>`;
  return `<section class="${side}">${title}${objective}${list}${notes}</section>`;
}

// A difference in the header and the first [1] in the code link to each other.
function connect(side) {
  const inCode = [...document.querySelectorAll(`#diff code.${side} .ref`)];
  document.querySelectorAll(`#cards .${side} .ref`).forEach((difference, index) => {
    const places = inCode.filter((link) => link.textContent === `[${index + 1}]`);
    if (places.length === 0) return;
    difference.id = `${shown},${side}${index + 1}`;
    places[0].id = `${difference.id}.code`;
    difference.href = `#${places[0].id}`;
    places.forEach((link) => (link.href = `#${difference.id}`));
  });
}

function axes(left, right) {
  const head = `<tr><td></td><th class="a" scope="col">${left}</th><th class="b" scope="col">${right}</th></tr>`;
  const rows = data.axes.map((axis, i) => {
    const [a, b] = [left, right].map((name) => data.scripts[name].axes[i]);
    const kind = a === b ? "" : "differs";
    return `<tr class="${kind}"><th scope="row">${axis}</th><td>${a}</td><td>${b}</td></tr>`;
  });
  find("axes").innerHTML = head + rows.join("");
}

// ----------------------------------------------------------------------------------------- the plots

const WIDTH = 380;
const HEIGHT = 220;
const EDGE = { left: 34, right: 18, top: 8, bottom: 22 };
const linear = (low, high) => (value) => (value - low) / (high - low);
const log = (low, high) => (value) => Math.log(value / low) / Math.log(high / low);
const ticks = (...values) => Object.fromEntries(values.map((value) => [value, value]));

// x and y: [scale, {label: value}]; series: [[side, points, is dashed]]
function plot(title, x, y, series, caption) {
  const across = (value) => EDGE.left + (WIDTH - EDGE.left - EDGE.right) * x[0](value);
  const up = (value) => HEIGHT - EDGE.bottom - (HEIGHT - EDGE.top - EDGE.bottom) * y[0](value);
  const columns = Object.entries(x[1]).map(([label, value]) => {
    const at = across(value);
    return `<line x1="${at}" x2="${at}" y1="${EDGE.top}" y2="${HEIGHT - EDGE.bottom}"/>
      <text x="${at}" y="${HEIGHT - 6}" text-anchor="middle">${label}</text>`;
  });
  const levels = Object.entries(y[1]).map(([label, value]) => {
    const at = up(value);
    return `<line x1="${EDGE.left}" x2="${WIDTH - EDGE.right}" y1="${at}" y2="${at}"/>
      <text x="${EDGE.left - 5}" y="${at + 4}" text-anchor="end">${label}</text>`;
  });
  const lines = series.map(([side, points, isDashed]) => {
    const drawn = points.filter((point) => point[1] !== null);
    const path = drawn.map(([a, b]) => `${across(a).toFixed(1)},${up(b).toFixed(1)}`).join(" ");
    return `<polyline class="${side} ${isDashed ? "dashed" : ""}" points="${path}"/>`;
  });
  const inside = [...columns, ...levels, ...lines].join("");
  return `<figure><h2>${title}</h2><svg viewBox="0 0 ${WIDTH} ${HEIGHT}" role="img" aria-label="${title}">
    ${inside}</svg><figcaption>${caption}</figcaption></figure>`;
}

function plots(left, right) {
  const both = [["a", left], ["b", right]];
  const points = (table, x, y) => table[x].map((value, i) => [value, table[y][i]]);
  const of = (table, x) => both.map(([side, name]) => [side, points(table, x, name)]);
  const pulls = ["+1 1", "-1 1", "+1 10", "-1 10"].flatMap((key) =>
    both.map(([side, name]) => [side, points(data.gradients, "ratio", `${name} ${key}`), key.endsWith("10")]));
  const longest = Math.max(...data.tokens.length);
  const last = Math.max(...names.map((name) => data.curves[name].at(-1)[0]));
  const shares = [linear(0, 1), ticks(0, 0.25, 0.5, 0.75, 1)];
  find("plots").innerHTML = [
    plot("Pull on a token", [log(1 / 3, 3), { "1/3": 1 / 3, "1/2": 1 / 2, ...ticks(1, 2, 3) }],
      [linear(-3.1, 3.1), ticks(-3, -2, -1, 0, 1, 2, 3)], pulls,
      `Gradient with respect to log π of a token in an answer of ten, against its ratio r (a log scale), for
       A = 1 (above 0) and −1 (below); 1 at r = 1. Solid: this token alone has moved; dashed: all ten have.
       Without grpo's KL.`),
    plot("Weight of a prompt", shares, shares, of(data.prompts, "right"),
      `Mean of max(A, 0) over a group, against the share of its answers that are right. dapo drops groups at
       0 and 1 and draws others. Before V or b of ppo, vapo and reinforce have learned anything.`),
    plot("Weight of a token", [linear(0, longest), ticks(0, 12, 24, 36, longest)],
      [log(0.4, 30), ticks(0.5, 1, 2, 5, 10, 25)], of(data.tokens, "length"),
      `Gradient of a token at r = 1, against the length of its answer, in a step with one answer of each
       length (a log scale); 1 is its weight in a plain mean over all tokens.`),
    plot("Learning", [linear(0, last), ticks(0, 5000, 10000, 15000)], shares,
      both.map(([side, name]) => [side, data.curves[name]]),
      `Accuracy of the rollouts on the default job, against completions generated: mean of the seeds, and of
       six iterations.`),
  ].join("");
}

// --------------------------------------------------------------------------------------- which pair

function show(left, right) {
  shown = `${left},${right}`;
  find("left").value = left;
  find("right").value = right;
  for (const link of document.querySelectorAll("nav a")) {
    link.className = { [left]: "a", [right]: "b" }[link.hash.slice(1)] ?? "";
    link.ariaCurrent = link.className !== "";
  }
  find("cards").innerHTML = card("a", left) + card("b", right);
  axes(left, right);
  plots(left, right);
  diff(left, right);
  connect("a");
  connect("b");
}

// #sapo: beside its parent; #dapo,sapo: these two; #dapo,sapo,b1: sapo's first difference
function follow() {
  const place = decodeURIComponent(location.hash.slice(1));
  const [first, second] = place.split(",");
  const name = names.includes(first) ? first : "sapo";
  const parent = data.parents[name] ?? names.find((child) => data.parents[child] === name);
  const pair = names.includes(second) ? [name, second] : [parent, name];
  if (shown === pair.join(",")) return;
  show(...pair);
  find(place)?.scrollIntoView();
}

for (const id of ["left", "right"]) {
  find(id).append(...names.map((name) => new Option(name, name)));
  find(id).onchange = () => (location.hash = `${find("left").value},${find("right").value}`);
}
window.onhashchange = follow;
follow();
