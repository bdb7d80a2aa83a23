/** Settings: the form, stored in the browser, and the request fields it sets. A blank field means the server's default. */

const KEY = "emberline.settings";
const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];

export class Settings {
  constructor(form, storage, session) {
    Object.assign(this, { form, storage, session });
    this.invalid = form.querySelector(".invalid");
    this.restore();
    form.addEventListener("input", () => this.changed());
    form.addEventListener("reset", () => setTimeout(() => this.changed())); // after the browser has reset the fields
    form.addEventListener("submit", (event) => event.preventDefault());
  }

  get key() {
    return this.form.key.value.trim();
  }

  get system() {
    return this.form.system.value;
  }

  get model() {
    return this.form.model.value;
  }

  setModels(models) {
    const selected = this.model || this.stored?.model;
    this.form.model.replaceChildren(...models.map((name) => new Option(name, name, false, name === selected)));
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

  /** Show which field is invalid. */
  reportInvalid() {
    if (this.form.reportValidity()) this.form.schema.focus();
  }

  /** Return the fields of a chat completion request, or null while a field is invalid. */
  request() {
    const format = this.format();
    if (format === null || !this.form.checkValidity()) return null;
    const body = { model: this.model, ...format };
    for (const name of NUMBERS) {
      const text = this.form[name].value;
      if (text !== "") body[name] = Number(text);
    }
    return body;
  }

  /** Return the response_format for the schema box: {} if it is empty, null if it is not JSON. */
  format() {
    const text = this.form.schema.value.trim();
    if (!text) return {};
    try {
      const schema = JSON.parse(text);
      return { response_format: { type: "json_schema", json_schema: { name: "answer", strict: true, schema } } };
    } catch {
      return null;
    }
  }

  changed() {
    for (const slider of this.form.querySelectorAll("[type=range]")) {
      slider.parentElement.querySelector("output").value = Number(slider.value).toFixed(2);
      slider.style.setProperty("--fill", (slider.value - slider.min) / (slider.max - slider.min));
    }
    const invalid = this.format() === null;
    this.invalid.hidden = !invalid;
    this.invalid.textContent = invalid ? "This is not valid JSON." : "";
    this.form.schema.ariaInvalid = String(invalid);
    const { key, ...stored } = Object.fromEntries(new FormData(this.form));
    this.storage.setItem(KEY, JSON.stringify(stored));
    this.session.setItem(KEY, key); // a secret: kept only until the tab is closed
  }

  restore() {
    try {
      this.stored = JSON.parse(this.storage.getItem(KEY)) ?? {};
    } catch {
      this.stored = {};
    }
    const values = { ...this.stored, key: this.session.getItem(KEY) ?? "" };
    for (const [name, value] of Object.entries(values)) {
      if (name !== "model" && this.form.elements[name]) this.form.elements[name].value = value;
    }
    this.changed();
    this.stored.model ??= "";
  }
}
