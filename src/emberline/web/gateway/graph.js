/** Draws the graph of a route from the start at the top to its end, with an arrow for each output. The graph may be
    incomplete: an output to an unknown id is drawn as a missing element. */

import { svg } from "../dom.js";

const BOX = { width: 164, height: 48 };
const LANE = 14; // width of a slot through which an arrow passes a row
const GAP = { x: 26, y: 46 };
const MARGIN = 12;

export function drawGraph(elements) {
  const { slots, arrows } = layOut(elements);
  const width = Math.max(0, ...slots.map((slot) => slot.x + slot.width)) + MARGIN;
  const height = Math.max(0, ...slots.map(({ y }) => y)) + BOX.height + MARGIN;
  const boxes = slots.filter(({ element }) => element);
  const tip = svg("marker", { id: "tip", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" }, svg("path", { d: "M0 0 8 4 0 8Z" }));
  const frame = { class: "graph", viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": ariaText(boxes) };
  return svg("svg", frame, svg("defs", {}, tip), ...arrows.map(arrow), ...boxes.map(box));
}

/** Return [name, target id] of each output. */
const outputs = (element) =>
  Object.entries(element.outputs ?? {})
    .filter(([, to]) => to && typeof to === "object")
    .map(([name, to]) => [name, String(to.elementId)]);

/** Return slots in rows, each element below all that lead to it, and arrows as chains of slots, one in each row crossed. */
function layOut(elements) {
  const byId = new Map(elements.map((element) => [String(element.id), element]));
  for (const element of elements) {
    for (const [, to] of outputs(element)) if (!byId.has(to)) byId.set(to, { id: to, type: "missing" });
  }
  const depth = depths(byId);
  const rows = [];
  const addSlot = (row, width, more) => {
    const slot = { row, width, parents: [], ...more };
    (rows[row] ??= []).push(slot);
    return slot;
  };
  const nodes = new Map([...byId].map(([id, element]) => [id, addSlot(depth.get(id), BOX.width, { id, element })]));
  const arrows = [...nodes.values()].flatMap((node) =>
    outputs(node.element).map(([name, to], index, all) => {
      const chain = [node];
      const end = nodes.get(to);
      for (let row = node.row + 1; row < end.row; row += 1) chain.push(addSlot(row, LANE, { parents: [chain.at(-1)] }));
      end.parents.push(chain.at(-1));
      return { name, chain: [...chain, end], share: (index + 1) / (all.length + 1) };
    }),
  );
  const slots = rows.filter(Boolean).flatMap(positionRow);
  const left = Math.min(0, ...slots.map(({ x }) => x));
  for (const slot of slots) slot.x += MARGIN - left;
  return { slots, arrows };
}

/** Return the longest distance of each element from the start; bounded if there is a cycle. */
function depths(byId) {
  const depth = new Map([...byId.keys()].map((id) => [id, 0]));
  for (let round = 0; round < byId.size; round += 1) {
    for (const [id, element] of byId) {
      for (const [, to] of outputs(element)) {
        if (to !== id && depth.get(to) <= depth.get(id) && depth.get(id) + 1 < byId.size) depth.set(to, depth.get(id) + 1);
      }
    }
  }
  return depth;
}

/** Position the slots of a row, centred, in the order of the slots that lead to them. */
function positionRow(row, index) {
  const preferredX = (slot) => {
    const above = slot.parents.filter(({ x }) => x !== undefined);
    return above.length ? above.reduce((sum, each) => sum + middle(each), 0) / above.length : 0;
  };
  const ordered = row.map((slot) => [preferredX(slot), slot]).sort(([a], [b]) => a - b).map(([, slot]) => slot);
  let x = -ordered.reduce((sum, { width }) => sum + width + GAP.x, -GAP.x) / 2;
  for (const slot of ordered) {
    Object.assign(slot, { x, y: MARGIN + index * (BOX.height + GAP.y) });
    x += slot.width + GAP.x;
  }
  return ordered;
}

const middle = ({ x, width }) => x + width / 2;

function box({ id, element, x, y }) {
  const [title, about] = describe(element);
  const text = (content, className, dy) => svg("text", { class: className, x: x + 12, y: y + dy }, truncate(content));
  const tooltip = svg("title", {}, `${id}: ${title} ${about}`);
  return svg("g", { class: `box ${element.type}`, "data-id": id }, tooltip, svg("rect", { x, y, rx: 10, ...BOX }), text(title, "what", 20), text(about, "more", 37));
}

const truncate = (text) => (text.length > 24 ? `${text.slice(0, 23)}…` : text);

function describe({ id, type, properties }) {
  const values = properties ?? {};
  switch (type) {
    case "model":
      return [String(values.model ?? "?"), `${values.provider ?? "?"}${values.retries ? `, ${values.retries} retries` : ""}`];
    case "conditional":
      return ["if", JSON.stringify(values.condition ?? {}).replace(/[{}"]/g, "").replaceAll(":", " ")];
    case "rate_limit":
      return [`limit ${values.limitType === "cost" ? "$" : ""}${values.limit ?? "?"}`, `per ${values.interval ?? "?"} s${values.key ? `, ${values.key}` : ""}`];
    case "missing":
      return ["missing", String(id)];
    default:
      return [type === "percentage" ? "split" : String(type), String(id)];
  }
}

function arrow({ name, chain, share }) {
  const [from, ...rest] = chain;
  const start = [from.x + from.width * share, from.y + BOX.height];
  let at = start;
  const label = svg("text", { class: "output", x: at[0] + 5, y: at[1] + 13 }, name);
  const curves = rest.map((slot) => {
    const to = [middle(slot), slot.y];
    const reach = Math.max(24, (to[1] - at[1]) / 2);
    const curve = `C${at[0]} ${at[1] + reach} ${to[0]} ${to[1] - reach} ${to}`;
    at = [to[0], to[1] + BOX.height];
    return slot.element ? curve : `${curve}V${at[1]}`;
  });
  const kind = name === "fallback" || name === "false" ? "arrow otherwise" : "arrow";
  return svg("g", {}, svg("path", { class: kind, d: `M${start}${curves.join("")}`, "marker-end": "url(#tip)" }), label);
}

const ariaText = (nodes) => nodes.map(({ id, element }) => `${describe(element).join(" ")}${outputs(element).map(([name, to]) => `, ${name} to ${to}`).join("")} (${id})`).join("; ");
