/** A route's graph, drawn: from the start on the left to where it ends, an arrow for each output. It may be half written:
    what points nowhere is drawn as missing. */

import { svg } from "../dom.js";

const BOX = { width: 168, height: 48 };
const GAP = { x: 88, y: 22 };
const MARGIN = 12;

export function drawn(elements) {
  const nodes = laidOut(elements);
  const width = Math.max(0, ...nodes.map(({ x }) => x)) + BOX.width + MARGIN;
  const height = Math.max(0, ...nodes.map(({ y }) => y)) + BOX.height + MARGIN;
  const places = new Map(nodes.map((node) => [node.id, node]));
  const arrows = nodes.flatMap((node) => outputs(node.element).map(([name, to], i, all) => arrow(node, places.get(to), name, i, all.length)));
  const tip = svg("marker", { id: "tip", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" }, svg("path", { d: "M0 0 8 4 0 8Z" }));
  const frame = { class: "graph", viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": spoken(nodes) };
  return svg("svg", frame, svg("defs", {}, tip), ...arrows, ...nodes.map(box));
}

/** [name of the output, id it goes to] */
export const outputs = (element) =>
  Object.entries(element.outputs ?? {})
    .filter(([, to]) => to && typeof to === "object")
    .map(([name, to]) => [name, String(to.elementId)]);

/** Each element right of all that lead to it, as far as there is no circle. */
function laidOut(elements) {
  const known = new Map(elements.map((element) => [String(element.id), element]));
  for (const element of elements) {
    for (const [, to] of outputs(element)) if (!known.has(to)) known.set(to, { id: to, type: "missing" });
  }
  const depth = new Map([...known.keys()].map((id) => [id, 0]));
  for (let round = 0; round < known.size; round += 1) {
    for (const [id, element] of known) {
      for (const [, to] of outputs(element)) {
        if (to !== id && depth.get(to) <= depth.get(id) && depth.get(id) < known.size) depth.set(to, depth.get(id) + 1);
      }
    }
  }
  const filled = new Map();
  return [...known].map(([id, element]) => {
    const column = depth.get(id);
    const row = filled.get(column) ?? 0;
    filled.set(column, row + 1);
    return { id, element, x: MARGIN + column * (BOX.width + GAP.x), y: MARGIN + row * (BOX.height + GAP.y) };
  });
}

function box({ id, element, x, y }) {
  const [title, about] = words(element);
  const text = (content, className, dy) => svg("text", { class: className, x: x + 12, y: y + dy }, fitting(content));
  const whole = svg("title", {}, `${id}: ${title} ${about}`);
  return svg("g", { class: `box ${element.type}`, "data-id": id }, whole, svg("rect", { x, y, rx: 10, ...BOX }), text(title, "what", 20), text(about, "more", 37));
}

const fitting = (text) => (text.length > 24 ? `${text.slice(0, 23)}…` : text);

function words({ id, type, properties = {} }) {
  switch (type) {
    case "model":
      return [properties.model ?? "?", `${properties.provider ?? "?"}${properties.retries ? `, ${properties.retries} retries` : ""}`];
    case "conditional":
      return ["if", JSON.stringify(properties.condition ?? {})];
    case "rate_limit":
      return [`limit ${properties.limitType === "cost" ? "$" : ""}${properties.limit ?? "?"}`, `per ${properties.interval ?? "?"} s${properties.key ? ` and ${properties.key}` : ""}`];
    case "percentage":
      return ["split", `${id}`];
    case "missing":
      return ["not there", id];
    default:
      return [String(type), String(id)];
  }
}

function arrow(from, to, name, index, all) {
  const start = [from.x + BOX.width, from.y + (BOX.height * (index + 1)) / (all + 1)];
  const end = [to.x, to.y + BOX.height / 2];
  const reach = Math.max(36, (end[0] - start[0]) / 2);
  const path = svg("path", { class: `arrow ${name === "fallback" || name === "false" ? "otherwise" : ""}`, d: `M${start}C${start[0] + reach} ${start[1]} ${end[0] - reach} ${end[1]} ${end}`, "marker-end": "url(#tip)" });
  return svg("g", {}, path, svg("text", { class: "output", x: start[0] + 6, y: start[1] - 4 }, name));
}

const spoken = (nodes) => nodes.map(({ id, element }) => `${words(element).join(" ")}${outputs(element).map(([name, to]) => `, ${name} to ${to}`).join("")} (${id})`).join("; ");
