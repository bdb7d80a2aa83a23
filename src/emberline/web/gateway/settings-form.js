/** SettingsForm: the settings of one gateway as a form. Each field has the path of its setting as its name, so that an
    error reply, which names the setting, is shown beside its field. */

import { element } from "../dom.js";
import { button, field, list, showFieldError } from "./components.js";

const MICROS = 1_000_000;
const PERIODS = ["minute", "hour", "day", "week", "month"];
const WINDOWS = [
  ["fixed", "fixed"],
  ["sliding", "sliding"],
];
/** Settings that the URL or other pages set. */
const HIDDEN = ["account", "gateway", "version", "routes"];

const number = (name, label, more = {}) => ({ name, label, kind: "number", step: "any", required: true, ...more });
const check = (name, label) => ({ name, label, kind: "check" });
const select = (name, label, options, more = {}) => ({ name, label, kind: "select", options, ...more });
const names = (name, label, more = {}) => ({ name, label, kind: "names", ...more });

/** [title, explanation, fields]; a field's `name` is the path of its setting. */
const SECTIONS = [
  [
    "Authentication",
    "Which callers and models are admitted.",
    [
      check("authentication", "Requests need a gateway key"),
      names("allowed_models", "Models", { hint: "for example gpt-5*, llama*; * is any" }),
      names("allowed_providers", "Providers", { hint: "* is any" }),
      {
        name: "default_provider",
        label: "Default provider",
        required: true,
        hint: "of a model name without PROVIDER/",
      },
    ],
  ],
  [
    "Cache",
    "Complete, successful replies are stored, and equal requests get the stored reply.",
    [
      number("cache_ttl", "Keep replies for, seconds", { min: 0, step: 1, hint: "0: no cache" }),
      select("cache_scope", "Shared by", [
        ["gateway", "all callers"],
        ["key", "callers with the same key"],
        ["user", "requests of the same user"],
      ]),
      select("semantic.mode", "Similar prompts", [
        ["off", "are not matched"],
        ["shadow", "are counted only"],
        ["on", "get the stored reply"],
      ]),
      number("semantic.threshold", "Similarity", { min: 0.5, max: 1, hint: "0.5 to 1; 1: equal meaning" }),
      check("cache_invalidate_on_update", "A change of these settings empties the cache"),
    ],
  ],
  [
    "Retries and timeouts",
    "A failed request is sent to the same provider again. Then fallbacks are tried.",
    [
      number("retries.attempts", "Attempts", { min: 1, max: 5, step: 1, hint: "1 to 5, with the first" }),
      number("retries.delay", "Delay, seconds", { min: 0, max: 5, hint: "before the second attempt" }),
      select("retries.backoff", "Delay grows", [
        ["constant", "not"],
        ["linear", "linearly"],
        ["exponential", "exponentially"],
      ]),
      number("timeouts.connect", "Connect, seconds", { min: 0 }),
      number("timeouts.first_byte", "First content, seconds", { min: 0 }),
      number("timeouts.between_events", "Between events, seconds", { min: 0 }),
      number("timeouts.total", "Whole request, seconds", { min: 0 }),
      number("breaker.failures", "Skip a provider after", { min: 1, step: 1, hint: "failures in a row" }),
      number("breaker.pause", "Skip it for, seconds", { min: 0, max: 30, hint: "doubled each time up to 30" }),
    ],
  ],
  [
    "Fallbacks",
    "Models that are tried in order when a request for a model fails.",
    [
      {
        name: "fallbacks",
        kind: "rows",
        add: "Add a fallback",
        row: () => ({ model: "*", to: [] }),
        fields: [
          {
            name: "model",
            label: "When this model fails",
            required: true,
            placeholder: "openai/*",
            hint: "a name, a prefix with *, or * for all",
          },
          names("to", "Try", {
            required: true,
            placeholder: "anthropic/claude-sonnet-4-5",
            hint: "PROVIDER/MODEL, with commas between several",
          }),
        ],
      },
      check("continuation", "A fallback continues a stream that breaks off"),
    ],
  ],
  [
    "Limits",
    "On requests and tokens. A request that would exceed one gets status 429.",
    [
      {
        name: "limits",
        kind: "rows",
        add: "Add a limit",
        row: () => ({ name: "", limit: 100, amount: "requests", per: "minute", technique: "fixed", split: [] }),
        fields: ruleFields([
          ["requests", "requests"],
          ["tokens", "tokens"],
        ]),
      },
    ],
  ],
  [
    "Budgets",
    "On money. Budgets for several gateways are on the page Budgets.",
    [
      {
        name: "budgets",
        kind: "rows",
        add: "Add a budget",
        row: () => ({ name: "", limit: 10 * MICROS, amount: "micros", per: "day", technique: "fixed", split: [] }),
        fields: ruleFields([["micros", "dollars"]]),
      },
    ],
  ],
  [
    "Logs",
    "What is recorded about each request.",
    [
      check("logs.collect", "Log requests"),
      check("logs.payloads", "Store prompts and replies"),
      check("zdr", "Zero data retention: never store prompts and replies"),
      number("logs.days", "Keep for, days", { min: 1, max: 3650, step: 1 }),
    ],
  ],
];

function ruleFields(units) {
  return [
    { name: "name", label: "Name", required: true, maxLength: 64 },
    { name: "limit", label: "Limit", kind: "amount", min: 0, step: "any", required: true },
    select("amount", "Unit", units),
    { name: "per", label: "Per", kind: "period" },
    select("technique", "Window", WINDOWS),
    names("split", "For each", { placeholder: "all together", hint: "key, user, model, provider or metadata.NAME" }),
  ];
}

const FORM_SETTINGS = SECTIONS.flatMap(([, , fields]) => fields.map(({ name }) => name.split(".")[0]));

export class SettingsForm {
  /** `value`: the settings. `save(settings)` is called with the changed settings; it throws if they are invalid. */
  constructor(value, { isReadOnly, save }) {
    this.value = value;
    this.inputs = SECTIONS.flatMap(([, , fields]) => fields.map((spec) => makeInput(spec, read(value, spec.name))));
    const rest = Object.fromEntries(
      Object.entries(value).filter(([name]) => !HIDDEN.includes(name) && !FORM_SETTINGS.includes(name)),
    );
    this.rest = field({
      name: "rest",
      label: "Providers, pools, guardrails, model aliases, prices and metadata, as in the configuration file",
      kind: "area",
      rows: 14,
      wide: true,
      value: JSON.stringify(rest, null, 2),
    });
    this.error = element("p", { className: "form-error", role: "alert", hidden: true });
    this.send = element("button", { type: "submit", className: "primary" }, "Save");
    const sections = SECTIONS.map(([title, about, specs]) => {
      const inputs = specs.map(({ name }) => this.inputs.find((input) => input.name === name).node);
      return element(
        "section",
        { className: "card", data: { section: title } },
        element("h3", {}, title, " ", element("small", {}, about)),
        element("div", { className: "fields" }, ...inputs),
      );
    });
    const more = element(
      "details",
      { className: "card" },
      element("summary", {}, "Other settings, as JSON"),
      element("div", { className: "fields" }, this.rest),
    );
    const body = element("fieldset", { className: "settings", disabled: isReadOnly }, ...sections, more);
    const bar = isReadOnly ? null : element("div", { className: "save-bar" }, this.error, this.send);
    this.node = element("form", { id: "gateway-settings", autocomplete: "off", noValidate: false }, body, bar);
    this.node.addEventListener("submit", (event) => this.submit(event, save));
  }

  async submit(event, save) {
    event.preventDefault();
    this.error.hidden = true;
    this.send.disabled = true;
    try {
      await save(this.settings());
    } catch (error) {
      this.error.textContent = error.message;
      this.error.hidden = false;
      showFieldError(this.node, error);
    } finally {
      this.send.disabled = false;
    }
  }

  settings() {
    let rest;
    try {
      rest = JSON.parse(this.rest.control.value || "{}");
    } catch (error) {
      throw Object.assign(new Error(`The other settings are not valid JSON: ${error.message}`), { param: "rest" });
    }
    const result = structuredClone({
      ...rest,
      ...Object.fromEntries(FORM_SETTINGS.filter((name) => name in this.value).map((name) => [name, this.value[name]])),
    });
    for (const { name, value } of this.inputs) write(result, name, value());
    return result;
  }
}

/** Return { name, node, value() } for a field of SECTIONS. */
function makeInput(spec, current) {
  if (spec.kind === "rows") return makeRows(spec, current);
  if (spec.kind === "names") {
    const label = field({ ...spec, kind: "text", value: current.join(", ") });
    return { name: spec.name, node: label, value: () => list(label.control.value) };
  }
  if (spec.kind === "period") {
    const isCustom = !PERIODS.includes(current);
    const label = field({
      ...spec,
      kind: "select",
      value: String(current),
      options: isCustom ? [[String(current), `${current} s`], ...PERIODS] : PERIODS,
    });
    return {
      name: spec.name,
      node: label,
      value: () => (/^\d+$/.test(label.control.value) ? Number(label.control.value) : label.control.value),
    };
  }
  const isMissing = spec.kind === "select" && !spec.options.some(([option]) => option === current);
  const label = field({
    ...spec,
    ...(isMissing && { options: [[current, current], ...spec.options] }),
    value: current,
  });
  const values = { check: () => label.control.checked, number: () => Number(label.control.value) };
  return { name: spec.name, node: label, value: values[spec.kind] ?? (() => label.control.value.trim()) };
}

/** A list of objects: one line of fields for each, with buttons to add and to remove. */
function makeRows(spec, items) {
  const rows = [];
  const body = element("div", { className: "rows wide", data: { list: spec.name } });
  const rename = () =>
    rows.forEach((row, i) =>
      row.inputs.forEach((input) => (input.node.control.name = `${spec.name}[${i}].${input.name}`)),
    );
  const add = (item) => {
    const inputs = spec.fields.map((each) => makeRowInput(each, item));
    const row = { item, inputs, node: element("div", { className: "row" }, ...inputs.map(({ node }) => node)) };
    row.node.append(button("Remove", () => (rows.splice(rows.indexOf(row), 1), row.node.remove(), rename()), "danger"));
    rows.push(row);
    body.insertBefore(row.node, adder);
    rename();
  };
  const adder = button(spec.add, () => add(spec.row()));
  body.append(adder);
  items.forEach(add);
  const value = () =>
    rows.map(({ item, inputs }) => ({
      ...item,
      ...Object.fromEntries(inputs.map((input) => [input.name, input.value()])),
    }));
  return { name: spec.name, node: body, value };
}

function makeRowInput(spec, item) {
  if (spec.kind !== "amount") return makeInput(spec, item[spec.name] ?? DEFAULTS[spec.name]);
  const scale = item.amount === "micros" ? MICROS : 1;
  const input = makeInput({ ...spec, kind: "number" }, item.limit / scale);
  return { ...input, value: () => Math.round(Number(input.node.control.value) * scale) };
}

/** Values of the fields that a stored rule may leave out. */
const DEFAULTS = { split: [], per: "minute", technique: "fixed", amount: "requests" };

const read = (value, path) => path.split(".").reduce((inner, name) => inner?.[name], value);

function write(target, path, value) {
  const parts = path.split(".");
  const last = parts.pop();
  const inner = parts.reduce((object, name) => (object[name] ??= {}), target);
  inner[last] = value;
}
