/** Parts that several pages are made of: heads, tables, forms, dialogs, notes. */

import { element, icon } from "../dom.js";

const $ = (id) => document.getElementById(id);

export const button = (text, onclick, className = "") => element("button", { type: "button", className, onclick }, text);
export const link = (href, ...children) => element("a", { href }, ...children);
export const pill = (text, tone = "") => element("span", { className: `pill ${tone}` }, text);
export const empty = (text) => element("p", { className: "empty" }, text);

export function head(title, about, ...actions) {
  const text = element("div", {}, element("h2", {}, title), about ? element("p", {}, about) : null);
  return element("header", { className: "head" }, text, element("div", { className: "tools" }, ...actions.filter(Boolean)));
}

/** `columns`: [title, cell(row) -> node or text, class]. */
export function table(label, columns, rows, { open = null, none = "Nothing here yet." } = {}) {
  if (!rows.length) return empty(none);
  const titles = columns.map(([title, , kind = ""]) => element("th", { scope: "col", className: kind }, title));
  const lines = rows.map((row) => {
    const cells = columns.map(([, cell, kind = ""]) => element("td", { className: kind }, cell(row)));
    const line = element("tr", { data: { id: String(row.id ?? row.name ?? "") } }, ...cells);
    if (open) {
      line.className = "opens";
      line.addEventListener("click", (event) => event.target.closest("a, button") || open(row));
    }
    return line;
  });
  const made = element("table", { ariaLabel: label }, element("thead", {}, element("tr", {}, ...titles)), element("tbody", {}, ...lines));
  return element("div", { className: "table", tabIndex: 0, role: "region", ariaLabel: label }, made);
}

/** A field of a form: { name, label, kind, value, options, hint, ... the input's own properties }. */
export function field({ name, label, kind = "text", value = "", options = null, hint = "", wide = false, ...more }) {
  if (kind === "check") {
    const box = element("input", { type: "checkbox", name, checked: Boolean(value), ...more });
    return element("label", { className: "check" }, box, label);
  }
  const choices = (options ?? []).map((each) => {
    const [key, text] = Array.isArray(each) ? each : [each, each];
    return element("option", { value: key, selected: key === value }, text);
  });
  const input =
    kind === "select"
      ? element("select", { name, ...more }, ...choices)
      : kind === "area"
        ? element("textarea", { name, value, spellcheck: false, ...more })
        : element("input", { type: kind, name, value, autocomplete: "off", spellcheck: false, ...more });
  return element("label", { className: wide ? "wide" : "" }, label, input, hint ? element("small", {}, hint) : null);
}

/** A form whose `save(values)` may fail: what it says is shown in it. */
export function form(fields, submit, save) {
  const complaint = element("p", { className: "complaint wide", role: "alert", hidden: true });
  const send = element("button", { type: "submit", className: "primary" }, submit);
  const node = element("form", { className: "fields", autocomplete: "off" }, ...fields, complaint, element("div", { className: "wide actions" }, send));
  node.addEventListener("submit", async (event) => {
    event.preventDefault();
    complaint.hidden = true;
    send.disabled = true;
    try {
      await save(values(node));
    } catch (error) {
      complaint.textContent = error.message;
      complaint.hidden = false;
    } finally {
      send.disabled = false;
    }
  });
  return node;
}

export function values(node) {
  const found = {};
  for (const input of node.elements) {
    if (input.name) found[input.name] = input.type === "checkbox" ? input.checked : input.value.trim();
  }
  return found;
}

/** "a, b" to ["a", "b"]. */
export const list = (text) => text.split(",").map((each) => each.trim()).filter(Boolean);

export function ask(title, ...content) {
  const close = element("button", { type: "button", className: "icon", title: "Close", ariaLabel: "Close", onclick: () => $("dialog").close() }, "×");
  const top = element("header", {}, element("h2", { id: "dialog-title" }, title), close);
  $("dialog").replaceChildren(top, ...content);
  if (!$("dialog").open) $("dialog").showModal();
}

export const done = () => $("dialog").close();

/** Asks before what cannot be undone. */
export function confirmed(title, text, verb, act) {
  const sure = form([element("p", { className: "wide" }, text)], verb, async () => {
    await act();
    done();
  });
  ask(title, sure);
}

let fading = 0;
export function say(text) {
  $("toast").textContent = text;
  $("toast").hidden = false;
  clearTimeout(fading);
  fading = setTimeout(() => ($("toast").hidden = true), 4000);
}

/** Runs an act of a button; a failure is said, not lost. */
export const acting = (act) => async () => {
  try {
    await act();
  } catch (error) {
    say(error.message);
  }
};

export const withIcon = (name, text) => [icon(name), element("span", {}, text)];
