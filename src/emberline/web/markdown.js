/** Renders the Markdown that models usually write as DOM nodes. Strings only become text nodes, so it is safe. */

import { copyButton, element } from "./dom.js";
import { highlight } from "./highlight.js";

const FENCE = /^\s*(`{3,}|~{3,})\s*([\w+#.-]*)/;
const HEADING = /^(#{1,6})\s+(.*)/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)/;
const QUOTE = /^\s*>\s?/;
const RULE = /^\s*([-*_])\s*(\1\s*){2,}$/;

// Bounded repetitions: a hostile line of ten thousand brackets must not freeze the page.
const INLINE = /(`{1,3})(.{1,1000}?)\1|\*\*(\S.{0,1000}?)\*\*|\*([^\s*].{0,1000}?)\*|\[([^\]\n]{1,300})\]\((https?:\/\/[^\s)]{1,1000})\)/g;

/** Update `root` to show `text`. Unchanged blocks are kept, which is cheap while streaming. */
export function render(root, text) {
  const parsed = blocks(text);
  while (root.children.length > parsed.length) root.lastChild.remove();
  parsed.forEach((block, i) => {
    const old = root.children[i];
    if (old?.source === block.source) return;
    const node = BUILD[block.kind](block);
    node.source = block.source;
    if (old) old.replaceWith(node);
    else root.append(node);
  });
}

export function blocks(text) {
  const lines = text.split("\n");
  const result = [];
  for (let i = 0; i < lines.length; ) {
    if (!lines[i].trim()) {
      i += 1;
      continue;
    }
    const start = i;
    const kind = kindOf(lines[i]);
    i = end(kind, lines, i);
    result.push({ kind, lines: lines.slice(start, i), source: `${kind}:${lines.slice(start, i).join("\n")}` });
  }
  return result;
}

function kindOf(line) {
  if (FENCE.test(line)) return "code";
  if (HEADING.test(line)) return "heading";
  if (RULE.test(line)) return "rule";
  if (ITEM.test(line)) return "list";
  return QUOTE.test(line) ? "quote" : "paragraph";
}

/** Return the index of the line after the block that begins at `i`. */
function end(kind, lines, i) {
  if (kind === "heading" || kind === "rule") return i + 1;
  if (kind === "code") {
    const fence = lines[i].match(FENCE)[1];
    const closes = (line) => line.trim().startsWith(fence) && !line.trim().replaceAll(fence[0], "");
    const close = lines.findIndex((line, n) => n > i && closes(line));
    return close < 0 ? lines.length : close + 1;
  }
  const continues = (line) => kindOf(line) === kind || (kind === "list" && /^\s/.test(line) && !FENCE.test(line));
  let next = i + 1;
  while (next < lines.length && lines[next].trim() && continues(lines[next])) next += 1;
  return next;
}

const BUILD = {
  paragraph: ({ lines }) => element("p", {}, ...inline(lines.join("\n"))),
  heading({ lines }) {
    const [, marks, text] = lines[0].match(HEADING);
    return element(`h${Math.min(marks.length + 2, 6)}`, {}, ...inline(text)); // h1 and h2 belong to the page
  },
  rule: () => element("hr"),
  quote: ({ lines }) => element("blockquote", {}, ...inline(lines.map((line) => line.replace(QUOTE, "")).join("\n"))),
  list: ({ lines }) => list(items(lines)),
  code({ lines }) {
    const [, fence, language] = lines[0].match(FENCE);
    const closed = lines.length > 1 && lines.at(-1).trim().startsWith(fence);
    const code = lines.slice(1, closed ? -1 : undefined).join("\n");
    const name = element("span", {}, language || "text");
    const bar = element("div", { className: "code-bar" }, name, copyButton(() => code, "Copy the code"));
    const text = element("pre", { tabIndex: 0 }, element("code", {}, ...highlight(code, language)));
    return element("div", { className: "code" }, bar, text);
  },
};

function items(lines) {
  const result = [];
  for (const line of lines) {
    const match = line.match(ITEM);
    if (match) result.push({ depth: match[1].length, number: parseInt(match[2], 10), text: match[3] });
    else result.at(-1).text += `\n${line.trim()}`;
  }
  return result;
}

function list(all) {
  const { depth, number } = all[0];
  const root = Number.isNaN(number) ? element("ul") : element("ol", { start: number });
  for (let i = 0; i < all.length; ) {
    let next = i + 1;
    while (next < all.length && all[next].depth > depth) next += 1;
    const inner = all.slice(i + 1, next);
    root.append(element("li", {}, ...inline(all[i].text), inner.length ? list(inner) : null));
    i = next;
  }
  return root;
}

function inline(text) {
  const nodes = [];
  let from = 0;
  for (const match of text.matchAll(INLINE)) {
    const [whole, , code, strong, emphasis, label, address] = match;
    nodes.push(text.slice(from, match.index));
    if (code) nodes.push(element("code", {}, code));
    else if (strong) nodes.push(element("strong", {}, ...inline(strong)));
    else if (emphasis) nodes.push(element("em", {}, ...inline(emphasis)));
    else nodes.push(element("a", { href: address, rel: "noopener noreferrer", target: "_blank" }, label));
    from = match.index + whole.length;
  }
  return [...nodes, text.slice(from)];
}
