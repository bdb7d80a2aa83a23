/** A route's graph, drawn: from the start at the top to where it ends, an arrow for each output. It may be half written:
    what points nowhere is drawn as missing. */

import { svg } from "../dom.js";

const BOX = { width: 164, height: 48 };
const LANE = 14; // width of a place through which an arrow passes a row
const GAP = { x: 26, y: 46 };
const MARGIN = 12;

export function drawn(elements) {
  const { places, arrows } = laidOut(elements);
  const width = Math.max(0, ...places.map((place) => place.x + place.width)) + MARGIN;
  const height = Math.max(0, ...places.map(({ y }) => y)) + BOX.height + MARGIN;
  const boxes = places.filter(({ element }) => element);
  const tip = svg("marker", { id: "tip", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" }, svg("path", { d: "M0 0 8 4 0 8Z" }));
  const frame = { class: "graph", viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": spoken(boxes) };
  return svg("svg", frame, svg("defs", {}, tip), ...arrows.map(arrow), ...boxes.map(box));
}

/** [name of the output, id it goes to] */
const outputs = (element) =>
  Object.entries(element.outputs ?? {})
    .filter(([, to]) => to && typeof to === "object")
    .map(([name, to]) => [name, String(to.elementId)]);

/** Places in rows, each element below all that lead to it; arrows as chains of places, one in each row that they cross. */
function laidOut(elements) {
  const known = new Map(elements.map((element) => [String(element.id), element]));
  for (const element of elements) {
    for (const [, to] of outputs(element)) if (!known.has(to)) known.set(to, { id: to, type: "missing" });
  }
  const depth = depths(known);
  const rows = [];
  const placed = (row, width, more) => {
    const place = { row, width, leading: [], ...more };
    (rows[row] ??= []).push(place);
    return place;
  };
  const nodes = new Map([...known].map(([id, element]) => [id, placed(depth.get(id), BOX.width, { id, element })]));
  const arrows = [...nodes.values()].flatMap((node) =>
    outputs(node.element).map(([name, to], index, all) => {
      const chain = [node];
      const end = nodes.get(to);
      for (let row = node.row + 1; row < end.row; row += 1) chain.push(placed(row, LANE, { leading: [chain.at(-1)] }));
      end.leading.push(chain.at(-1));
      return { name, chain: [...chain, end], share: (index + 1) / (all.length + 1) };
    }),
  );
  const places = rows.filter(Boolean).flatMap(arranged);
  const left = Math.min(0, ...places.map(({ x }) => x));
  for (const place of places) place.x += MARGIN - left;
  return { places, arrows };
}

/** How many steps from the start, at most; a circle ends somewhere. */
function depths(known) {
  const depth = new Map([...known.keys()].map((id) => [id, 0]));
  for (let round = 0; round < known.size; round += 1) {
    for (const [id, element] of known) {
      for (const [, to] of outputs(element)) {
        if (to !== id && depth.get(to) <= depth.get(id) && depth.get(id) + 1 < known.size) depth.set(to, depth.get(id) + 1);
      }
    }
  }
  return depth;
}

/** A row, centred, in the order of what leads to it. */
function arranged(row, index) {
  const wanted = (place) => {
    const above = place.leading.filter(({ x }) => x !== undefined);
    return above.length ? above.reduce((sum, each) => sum + middle(each), 0) / above.length : 0;
  };
  const ordered = row.map((place) => [wanted(place), place]).sort(([a], [b]) => a - b).map(([, place]) => place);
  let x = -ordered.reduce((sum, { width }) => sum + width + GAP.x, -GAP.x) / 2;
  for (const place of ordered) {
    Object.assign(place, { x, y: MARGIN + index * (BOX.height + GAP.y) });
    x += place.width + GAP.x;
  }
  return ordered;
}

const middle = ({ x, width }) => x + width / 2;

function box({ id, element, x, y }) {
  const [title, about] = words(element);
  const text = (content, className, dy) => svg("text", { class: className, x: x + 12, y: y + dy }, fitting(content));
  const whole = svg("title", {}, `${id}: ${title} ${about}`);
  return svg("g", { class: `box ${element.type}`, "data-id": id }, whole, svg("rect", { x, y, rx: 10, ...BOX }), text(title, "what", 20), text(about, "more", 37));
}

const fitting = (text) => (text.length > 24 ? `${text.slice(0, 23)}…` : text);

function words({ id, type, properties }) {
  const given = properties ?? {};
  switch (type) {
    case "model":
      return [String(given.model ?? "?"), `${given.provider ?? "?"}${given.retries ? `, ${given.retries} retries` : ""}`];
    case "conditional":
      return ["if", JSON.stringify(given.condition ?? {}).replace(/[{}"]/g, "").replaceAll(":", " ")];
    case "rate_limit":
      return [`limit ${given.limitType === "cost" ? "$" : ""}${given.limit ?? "?"}`, `per ${given.interval ?? "?"} s${given.key ? `, ${given.key}` : ""}`];
    case "missing":
      return ["not there", String(id)];
    default:
      return [type === "percentage" ? "split" : String(type), String(id)];
  }
}

function arrow({ name, chain, share }) {
  const [from, ...through] = chain;
  const start = [from.x + from.width * share, from.y + BOX.height];
  let at = start;
  const label = svg("text", { class: "output", x: at[0] + 5, y: at[1] + 13 }, name);
  const steps = through.map((place) => {
    const to = [middle(place), place.y];
    const reach = Math.max(24, (to[1] - at[1]) / 2);
    const curve = `C${at[0]} ${at[1] + reach} ${to[0]} ${to[1] - reach} ${to}`;
    at = [to[0], to[1] + BOX.height];
    return place.element ? curve : `${curve}V${at[1]}`;
  });
  const kind = name === "fallback" || name === "false" ? "arrow otherwise" : "arrow";
  return svg("g", {}, svg("path", { class: kind, d: `M${start}${steps.join("")}`, "marker-end": "url(#tip)" }), label);
}

const spoken = (nodes) => nodes.map(({ id, element }) => `${words(element).join(" ")}${outputs(element).map(([name, to]) => `, ${name} to ${to}`).join("")} (${id})`).join("; ");
