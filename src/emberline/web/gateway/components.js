/** Components shared by the pages: headings, tables, forms, dialogs, toasts. */

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

/** `columns`: [title, cell(row) -> node or text, class]; `open(row)` is called on a click; `none` is shown without rows. */
export function table(label, columns, rows, { open = null, none = "Nothing here yet." } = {}) {
  if (!rows.length) return empty(none);
  const titles = columns.map(([title, , kind = ""]) => element("th", { scope: "col", className: kind }, title));
  const lines = rows.map((row) => {
    const cells = columns.map(([title, cell, kind = ""]) => element("td", { className: kind, data: { title } }, cell(row)));
    const line = element("tr", { data: { id: String(row.id ?? row.name ?? "") } }, ...cells);
    if (open) {
      line.className = "opens";
      line.addEventListener("click", (event) => event.target.closest("a, button") || open(row));
    }
    return line;
  });
  const node = element("table", { ariaLabel: label }, element("thead", {}, element("tr", {}, ...titles)), element("tbody", {}, ...lines));
  return element("div", { className: "table", tabIndex: 0, role: "region", ariaLabel: label }, node);
}

/** Return a labelled form field: { name, label, kind, value, options, hint, ... properties of the input }. */
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

/** Return a field to choose any number of values from a list, or to enter others. Its value is a text with commas.
    `setOptions([[value, label, note], ...])` fills the list later. */
export function choices({ name, label, value = "", none = "any" }) {
  const chosen = new Set(list(value));
  const input = element("input", { type: "hidden", name, value });
  const summary = element("summary", {});
  const other = element("input", { type: "text", placeholder: "another value", ariaLabel: `Another value of ${label}` });
  const options = element("div");
  const node = element("details", { className: "choices", data: { choices: name } }, summary, input, element("div", {}, options, other));
  const show = () => {
    input.value = [...chosen].join(",");
    summary.textContent = [...chosen].join(", ") || none;
    summary.title = summary.textContent;
  };
  const setOptions = (known) => {
    const unknown = [...chosen].filter((each) => !known.some(([option]) => option === each)).map((each) => [each, each, ""]);
    const boxes = [...unknown, ...known].map(([option, text, note]) => {
      const box = element("input", { type: "checkbox", checked: chosen.has(option), value: option });
      box.onchange = () => (box.checked ? chosen.add(option) : chosen.delete(option), show());
      return element("label", { className: "check" }, box, text, note ? element("small", {}, note) : null);
    });
    options.replaceChildren(...boxes);
  };
  other.onchange = () => {
    list(other.value).forEach((each) => chosen.add(each));
    other.value = "";
    setOptions([...options.querySelectorAll("input")].map((box) => [box.value, box.value, ""]).filter(([option], i, all) => all.findIndex(([each]) => each === option) === i));
    show();
  };
  node.addEventListener("toggle", () => node.open && document.querySelectorAll("details.choices[open]").forEach((each) => each !== node && (each.open = false)));
  node.addEventListener("keydown", (event) => event.key === "Escape" && (node.open = false));
  setOptions([]);
  show();
  return { node: element("div", {}, element("span", { className: "about" }, label), node), setOptions };
}

/** Return a form that calls `save(values)` on submit and shows its error message. */
export function form(fields, submit, save) {
  const errorNode = element("p", { className: "form-error wide", role: "alert", hidden: true });
  const send = element("button", { type: "submit", className: "primary" }, submit);
  const node = element("form", { className: "fields", autocomplete: "off" }, ...fields, errorNode, element("div", { className: "wide actions" }, send));
  node.addEventListener("submit", async (event) => {
    event.preventDefault();
    errorNode.hidden = true;
    send.disabled = true;
    try {
      await save(values(node));
    } catch (error) {
      errorNode.textContent = error.message;
      errorNode.hidden = false;
      showFieldError(node, error);
    } finally {
      send.disabled = false;
    }
  });
  return node;
}

/** Show an error beside the field that `error.param` names, and move to it. The field's next change removes the message. */
export function showFieldError(node, { message, param }) {
  node.querySelectorAll(".field-error").forEach((old) => old.remove());
  const input = param && [...node.elements].find(({ name }) => name && (param === name || param.startsWith(`${name}.`) || param.startsWith(`${name}[`)));
  const place = input ? input.closest("label") : param && node.querySelector(`[data-list="${CSS.escape(param.split(/[.[]/)[0])}"]`);
  if (!place) return;
  const note = element("small", { className: "field-error" }, message);
  place.append(note);
  place.closest("details")?.setAttribute("open", "");
  place.scrollIntoView({ block: "center" });
  input?.focus();
  input?.setAttribute("aria-invalid", "true");
  place.addEventListener("input", () => (note.remove(), input?.removeAttribute("aria-invalid")), { once: true });
}

export function values(node) {
  const result = {};
  for (const input of node.elements) {
    if (input.name) result[input.name] = input.type === "checkbox" ? input.checked : input.value.trim();
  }
  return result;
}

/** Split "a, b" into ["a", "b"]. */
export const list = (text) => text.split(",").map((each) => each.trim()).filter(Boolean);

export function openDialog(title, ...content) {
  const close = element("button", { type: "button", className: "icon", title: "Close", ariaLabel: "Close", onclick: () => $("dialog").close() }, "×");
  const top = element("header", {}, element("h2", { id: "dialog-title" }, title), close);
  $("dialog").replaceChildren(top, ...content);
  if (!$("dialog").open) $("dialog").showModal();
}

export const closeDialog = () => $("dialog").close();

/** Ask for confirmation before an action that cannot be undone. */
export function openConfirmDialog(title, text, verb, action) {
  const confirmForm = form([element("p", { className: "wide" }, text)], verb, async () => {
    await action();
    closeDialog();
  });
  openDialog(title, confirmForm);
}

let toastTimer = 0;
export function showToast(text) {
  $("toast").textContent = text;
  $("toast").hidden = false;
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => ($("toast").hidden = true), 4000);
}

/** Wrap the action of a button so that an error is shown as a toast. */
export const withErrorToast = (action) => async () => {
  try {
    await action();
  } catch (error) {
    showToast(error.message);
  }
};

export const withIcon = (name, text) => [icon(name), element("span", {}, text)];
