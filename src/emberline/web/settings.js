/** Settings: the form, stored in the browser, and the request fields it sets. A blank field means the server's default. */

import { element } from "./dom.js";
import { EXAMPLE_TOOLS } from "./tools.js";

const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];
const JSON_FIELDS = { schema: "The JSON schema", tools: "The list of tools" };

export class Settings {
  /** `storageKey`: name in both storages. `modelInput`: a select or a text input. `fields`: further labels of the form. */
  constructor({ storage, session, storageKey, modelInput, fields = [] }) {
    Object.assign(this, { storage, session, storageKey });
    this.modelNote = element("small", { id: "model-note" });
    this.invalid = element("p", { className: "wide invalid", id: "settings-error", role: "alert", hidden: true });
    this.form = element(
      "form",
      { id: "settings", ariaLabel: "Settings", autocomplete: "off" },
      ...this.build(modelInput, fields),
    );
    this.models = [];
    this.restore();
    this.form.addEventListener("input", () => this.changed());
    this.form.addEventListener("reset", () => setTimeout(() => this.changed())); // after the browser has reset the fields
    this.form.addEventListener("submit", (event) => event.preventDefault());
  }

  build(modelInput, fields) {
    modelInput.name = "model";
    modelInput.addEventListener("input", () => this.describeModel());
    const label = (text, input, className = "") => element("label", { className }, text, input);
    const area = (name, rows, placeholder) =>
      element("textarea", { name, rows, placeholder, spellcheck: name === "system" });
    const number = (name, text, more) => label(text, element("input", { name, type: "number", step: "1", ...more }));
    const slider = (name, text, min, max, value) =>
      element(
        "label",
        { className: "wide slide" },
        text,
        element("output"),
        element("input", { name, type: "range", min, max, step: "0.05", defaultValue: value }),
      );
    const title = element("h2", {}, "Settings ", element("button", { className: "link", type: "reset" }, "reset"));
    return [
      title,
      element("label", { className: "wide" }, "Model", modelInput, this.modelNote),
      ...fields,
      label("System prompt", area("system", 2, "None"), "wide"),
      slider("temperature", "Temperature", "0", "2", "0.7"),
      slider("top_p", "Top-p", "0.05", "1", "0.95"),
      number("top_k", "Top-k", { min: "0", max: "2147483647", placeholder: "off" }),
      number("max_tokens", "Max tokens", { min: "1", max: "2147483647", defaultValue: "512", placeholder: "no limit" }),
      number("seed", "Seed", { min: "0", max: "9007199254740991", placeholder: "random" }),
      label("JSON schema, which the answer must match", area("schema", 3, '{"type": "object", …}'), "wide"),
      element(
        "label",
        { className: "wide check" },
        element("input", { type: "checkbox", name: "example_tools" }),
        "Example tools: a calculator and a clock, run in this browser",
      ),
      label(
        "Own tools, whose results you enter",
        area("tools", 3, '[{"type": "function", "function": {"name": …}}]'),
        "wide",
      ),
      this.invalid,
    ];
  }

  value(name) {
    return this.form.elements[name]?.value.trim() ?? "";
  }

  get system() {
    return this.form.system.value;
  }

  get model() {
    return this.value("model");
  }

  /** `models`: entries of /v1/models. */
  setModels(models) {
    this.models = models;
    const selected = this.model || this.stored.model;
    const input = this.form.model;
    const options = models.map(
      (entry) =>
        new Option(input.tagName === "SELECT" ? optionText(entry) : entry.id, entry.id, false, entry.id === selected),
    );
    if (input.tagName === "SELECT") input.replaceChildren(...options);
    else {
      input.list.replaceChildren(...options);
      if (document.activeElement !== input) input.value ||= selected || (models[0]?.id ?? ""); // not while the user types
    }
    this.describeModel();
  }

  describeModel() {
    const found = this.models.find(({ id }) => id === this.model);
    this.modelNote.textContent = describe(found);
    this.applyDefaults(found?.default_sampling_params ?? {});
  }

  /** Make the model's sampling defaults the form's defaults; fields that the user changed keep their value. */
  applyDefaults(defaults) {
    for (const name of NUMBERS) {
      const field = this.form[name];
      if (defaults[name] === undefined) continue;
      const untouched = field.value === field.defaultValue;
      field.defaultValue = String(defaults[name]);
      if (untouched) field.value = field.defaultValue;
    }
    this.changed();
  }

  /** Return why the settings cannot be used, as { field, message }, or null. */
  problem() {
    for (const [name, title] of Object.entries(JSON_FIELDS)) {
      try {
        const value = JSON.parse(this.value(name) || "null");
        if (name === "tools" && value !== null && !Array.isArray(value))
          return { field: name, message: `${title} must be a JSON list.` };
      } catch (error) {
        return { field: name, message: `${title} is not valid JSON: ${error.message}` };
      }
    }
    const field = [...this.form.elements].find((input) => input.name && !input.checkValidity());
    return field ? { field: field.name, message: `${field.name}: ${field.validationMessage}` } : null;
  }

  /** Move to an invalid field. */
  reportInvalid({ field }) {
    const input = this.form.elements[field];
    input.scrollIntoView({ block: "center" });
    if (this.form.reportValidity()) input.focus();
  }

  /** Return the fields of a chat completion request. There must be no problem. */
  request() {
    const body = { model: this.model };
    const schema = JSON.parse(this.value("schema") || "null");
    if (schema !== null)
      body.response_format = { type: "json_schema", json_schema: { name: "answer", strict: true, schema } };
    const tools = [
      ...(this.form.example_tools.checked ? EXAMPLE_TOOLS : []),
      ...JSON.parse(this.value("tools") || "[]"),
    ];
    if (tools.length) body.tools = tools;
    for (const name of NUMBERS) {
      const text = this.form[name].value;
      if (text !== "") body[name] = Number(text);
    }
    return body;
  }

  changed() {
    for (const slider of this.form.querySelectorAll("[type=range]")) {
      slider.parentElement.querySelector("output").value = Number(slider.value).toFixed(2);
      slider.style.setProperty("--fill", (slider.value - slider.min) / (slider.max - slider.min));
    }
    const found = this.problem();
    const problem = found && this.form.elements[found.field].value ? found : null; // a required field may still be empty
    this.invalid.hidden = problem === null;
    this.invalid.textContent = problem?.message ?? "";
    for (const name of Object.keys(JSON_FIELDS)) this.form.elements[name].ariaInvalid = String(problem?.field === name);
    const place = problem && this.form.elements[problem.field].closest("label");
    if (place && place.nextSibling !== this.invalid) place.after(this.invalid); // beside the field
    const { key, ...stored } = Object.fromEntries(new FormData(this.form));
    this.storage.setItem(this.storageKey, JSON.stringify(stored));
    if (key !== undefined) this.session.setItem(this.storageKey, key); // a secret: kept only until the tab is closed
  }

  restore() {
    try {
      this.stored = JSON.parse(this.storage.getItem(this.storageKey)) ?? {};
    } catch {
      this.stored = {};
    }
    const values = { ...this.stored, key: this.session.getItem(this.storageKey) ?? "" };
    for (const [name, value] of Object.entries(values)) {
      const field = this.form.elements[name];
      if (!field || field.tagName === "SELECT") continue;
      if (field.type === "checkbox") field.checked = value === "on";
      else field.value = value;
    }
    this.changed();
    this.stored.model ??= "";
  }
}

function optionText(entry) {
  const context = entry.max_model_len && `${Math.round(entry.max_model_len / 1024)}k context`;
  const facts = [entry.parameter_size, context].filter(Boolean).join(", ");
  return facts ? `${entry.id} (${facts})` : entry.id;
}

/** Return the size and the context of a model, as far as they are known: "600M parameters, context 32,768 tokens". */
function describe(entry) {
  if (!entry) return "";
  const size = entry.parameter_size && `${entry.parameter_size} parameters`;
  const context = entry.max_model_len ? `context ${entry.max_model_len.toLocaleString("en-US")} tokens` : "";
  return [size, context].filter(Boolean).join(", ");
}
