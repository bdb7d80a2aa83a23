/** Settings: the form, remembered by the browser, and the request fields it stands for. Blank means the server's default. */

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

  offer(models) {
    const wanted = this.model || this.remembered?.model;
    this.form.model.replaceChildren(...models.map((name) => new Option(name, name, false, name === wanted)));
  }

  /** The model's own sampling defaults become the form's, but for fields that were changed before. */
  suggest(defaults) {
    for (const name of NUMBERS) {
      const field = this.form[name];
      if (defaults[name] === undefined) continue;
      const untouched = field.value === field.defaultValue;
      field.defaultValue = String(defaults[name]);
      if (untouched) field.value = field.defaultValue;
    }
    this.changed();
  }

  /** Shows the person the field that is wrong. */
  complain() {
    if (this.form.reportValidity()) this.form.schema.focus();
  }

  /** Fields of a chat completion, or null while a field is wrong. */
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

  /** response_format for the schema box: {} when it is empty, null when it is not JSON. */
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
    const wrong = this.format() === null;
    this.invalid.hidden = !wrong;
    this.invalid.textContent = wrong ? "This is not valid JSON yet." : "";
    this.form.schema.ariaInvalid = String(wrong);
    const { key, ...kept } = Object.fromEntries(new FormData(this.form));
    this.storage.setItem(KEY, JSON.stringify(kept));
    this.session.setItem(KEY, key); // a secret: forgotten with the tab
  }

  restore() {
    try {
      this.remembered = JSON.parse(this.storage.getItem(KEY)) ?? {};
    } catch {
      this.remembered = {};
    }
    const values = { ...this.remembered, key: this.session.getItem(KEY) ?? "" };
    for (const [name, value] of Object.entries(values)) {
      if (name !== "model" && this.form.elements[name]) this.form.elements[name].value = value;
    }
    this.changed();
    this.remembered.model ??= "";
  }
}
