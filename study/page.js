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
  const swapped = data.pairs[`${right},${left}`] ?? data.scripts[left].lines.map((_, i) => [i, i]);
  return data.pairs[`${left},${right}`] ?? swapped.map(([i, j]) => [j, i]);
}

function cell(side, name, i) {
  if (i === null) return `<span class="none"></span><code class="none"></code>`;
  const { lines, first } = data.scripts[name];
  return `<span class="${side}">${first + i}</span><code class="${side}">${lines[i]}</code>`;
}

// All but the lines next to a difference go into one that opens.
function folded(rows, isStart, isEnd) {
  const head = isStart ? 0 : KEPT;
  const end = rows.length - (isEnd ? 0 : KEPT);
  if (end - head <= KEPT) return rows;
  const inside = rows.slice(head, end);
  const fold = `<details><summary>${inside.length} identical lines</summary>${inside.join("")}</details>`;
  return [...rows.slice(0, head), fold, ...rows.slice(end)];
}

function diff(left, right) {
  const parts = [];
  let same = []; // equal rows since the last difference
  let changed = 0;
  for (const [i, j] of rowsOf(left, right)) {
    const cells = cell("a", left, i) + cell("b", right, j);
    if (data.scripts[left].lines[i] === data.scripts[right].lines[j]) {
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
  const paragraphs = script.notes.map((text) => `<p>${escaped(text)}</p>`).join("");
  const notes = `<details><summary>What the paper leaves open, and our choices</summary>${paragraphs}</details>`;
  const title = `<h2>${file(name)}: ${escaped(script.title)}</h2>`;
  const objective = `<pre>${escaped(script.objective)}</pre>`;
  return `<section class="${side}">${title}${objective}${list}${notes}</section>`;
}

function firstChange(side) {
  const lines = [...document.querySelectorAll(`#diff .changed code.${side}`)];
  return lines.find((line) => line.textContent.startsWith("def ")) ?? lines[0];
}

// A difference in the header and the first [1] in the code link to each other. Without a [1], which only
// functions that all scripts share cannot have, it links to the first function or line that differs.
function connect(side) {
  const inCode = [...document.querySelectorAll(`#diff code.${side} .ref`)];
  document.querySelectorAll(`#cards .${side} .ref`).forEach((difference, index) => {
    const places = inCode.filter((link) => link.textContent === `[${index + 1}]`);
    if (places.length === 0) places.push(firstChange(side));
    if (!places[0]) return;
    difference.id = `${shown},${side}${index + 1}`;
    places[0].id = `${difference.id}.code`;
    difference.href = `#${places[0].id}`;
    places.forEach((link) => (link.href = `#${difference.id}`));
  });
}

// The flags that differ, or that only one has. A name may break after an underscore: on a phone the table
// would be too wide.
function flags(left, right) {
  const [a, b] = [data.scripts[left].flags, data.scripts[right].flags];
  const head = `<tr><td>flags that differ</td><th class="a" scope="col">${left}</th><th class="b" scope="col">${right}</th></tr>`;
  const differ = Object.keys({ ...a, ...b }).filter((flag) => a[flag] !== b[flag]);
  const rows = differ.map((flag) => {
    const name = `--${flag}`.replaceAll("_", "_<wbr>");
    return `<tr><th scope="row">${name}</th><td>${a[flag] ?? "–"}</td><td>${b[flag] ?? "–"}</td></tr>`;
  });
  find("flags").innerHTML = rows.length > 0 ? head + rows.join("") : "";
}

// ----------------------------------------------------------------------------------------- the plots

const WIDTH = 400;
const HEIGHT = 270;
const EDGE = { left: 50, right: 20, top: 30, bottom: 46 };

function axis({ isLog = false, ticks, low, high }) {
  const scale = isLog ? Math.log : (value) => value;
  const place = (value) => (scale(value) - scale(low)) / (scale(high) - scale(low));
  return { ticks, place };
}

// x, y: {label} and what `axis` takes, ticks as [[label, value]]; series: [{label, css, lines: [[[x, y]]]}];
// words: [[x, y, text]]
function plot({ title, x, y, series, words = [], caption = "" }) {
  const across = axis(x);
  const up = axis(y);
  const [right, bottom] = [WIDTH - EDGE.right, HEIGHT - EDGE.bottom];
  const left = (value) => EDGE.left + (right - EDGE.left) * across.place(value);
  const top = (value) => bottom - (bottom - EDGE.top) * up.place(value);
  const parts = [];
  for (const [label, value] of across.ticks) {
    parts.push(`<line x1="${left(value)}" x2="${left(value)}" y1="${EDGE.top}" y2="${bottom}"/>`);
    parts.push(`<text x="${left(value)}" y="${bottom + 16}" text-anchor="middle">${label}</text>`);
  }
  for (const [label, value] of up.ticks) {
    parts.push(`<line x1="${EDGE.left}" x2="${right}" y1="${top(value)}" y2="${top(value)}"/>`);
    parts.push(`<text x="${EDGE.left - 6}" y="${top(value) + 4}" text-anchor="end">${label}</text>`);
  }
  for (const { css, lines } of series) {
    for (const line of lines) {
      const path = line.map(([a, b]) => `${left(a).toFixed(1)},${top(b).toFixed(1)}`);
      parts.push(`<polyline class="${css}" points="${path.join(" ")}"/>`);
    }
  }
  parts.push(...words.map(([a, b, text]) => `<text x="${left(a)}" y="${top(b)}">${text}</text>`));
  parts.push(`<text x="0" y="16">${escaped(y.label)}</text>`);
  parts.push(`<text x="${right}" y="${HEIGHT - 8}" text-anchor="end">${escaped(x.label)}</text>`);
  const keys = series.map(({ label, css }) =>
    `<span><svg viewBox="0 0 24 8"><polyline class="${css}" points="0,4 24,4"/></svg> ${escaped(label)}</span>`);
  return `<figure><h3>${escaped(title)}</h3><p class="legend">${keys.join(" ")}</p>
    <svg viewBox="0 0 ${WIDTH} ${HEIGHT}" role="img" aria-label="${escaped(title)}">${parts.join("")}</svg>
    <figcaption>${caption}</figcaption></figure>`;
}

// A second, dashed line where it matters whether all ten tokens of the answer moved, or one alone.
function pulls(css, name) {
  const points = (key) => data.gradients.ratio.map((ratio, i) => [ratio, data.gradients[`${name} ${key}`][i]]);
  const alone = { label: name, css, lines: [points("+1 1"), points("-1 1")] };
  const together = { label: `${name}, all ten`, css: `${css} dashed`, lines: [points("+1 10"), points("-1 10")] };
  const isSame = JSON.stringify(alone.lines) === JSON.stringify(together.lines);
  return isSame ? [alone] : [alone, together];
}

const numbers = (...values) => values.map((value) => [value, value]);

function plots(left, right) {
  const both = [["a", left], ["b", right]];
  const weights = ([css, name]) =>
    ({ label: name, css, lines: [data.tokens.length.map((length, i) => [length, data.tokens[name][i]])] });
  find("plots").innerHTML = [
    plot({
      title: "Gradient of a token",
      x: { label: "ratio r", isLog: true, low: 1 / 3, high: 3, ticks: [["1/3", 1 / 3], ["1/2", 1 / 2], ...numbers(1, 2, 3)] },
      y: { label: "dJ / d log π", low: -3.1, high: 3.1, ticks: numbers(-3, -2, -1, 0, 1, 2, 3) },
      series: both.flatMap(([css, name]) => pulls(css, name)),
      words: [[0.35, 2.5, "A = +1"], [0.35, -2.7, "A = −1"]],
      caption: `The gradient for one token in an answer of ten, without grpo's KL, relative to r = 1. Solid: only this
        token has moved. Dashed, if different: all ten have.`,
    }),
    plot({
      title: "Weight of a token",
      x: { label: "length of its answer", low: 0, high: data.tokens.length.at(-1), ticks: numbers(0, 10, 20, 30, 40) },
      y: { label: "relative to a mean over all tokens", isLog: true, low: 0.4, high: 30,
        ticks: numbers(0.5, 1, 2, 5, 10, 25) },
      series: both.map(weights),
      caption: `At r = 1, in a step with one answer of each length. Only the shape matters, since AdamW ignores a common
        scale: dr_grpo is as flat as dapo.`,
    }),
  ].join("");
}

// --------------------------------------------------------------------------------------- which pair

function show(left, right) {
  shown = `${left},${right}`;
  document.title = `${left} and ${right}, side by side`;
  find("left").value = left;
  find("right").value = right;
  for (const link of document.querySelectorAll("nav a")) {
    link.className = { [left]: "a", [right]: "b" }[link.hash.slice(1)] ?? "";
    link.ariaCurrent = link.className !== "";
  }
  find("cards").innerHTML = card("a", left) + card("b", right);
  diff(left, right);
  flags(left, right);
  plots(left, right);
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
  const unknown = place.split(",").slice(0, 2).filter((word) => word && !names.includes(word));
  find("unknown").textContent = unknown.map((word) => `There is no script ${word}.`).join(" ");
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
