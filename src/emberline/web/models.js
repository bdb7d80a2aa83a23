/** Models at run time: a dialog that lists the models of the server and pulls, loads, unloads and removes them. */

import { element } from "./dom.js";
import { ModelManagement } from "./wire.js";

const POLL_MS = 2000;
const STORAGE_KEY = "emberline.admin-key"; // in the session storage: kept only until the tab is closed
const MEMORY_GB = [4, 8, 16, 24, 32, 48, 80, 141];
const OTHER_MEMORY = 2e9; // bytes of the KV cache, the process and other programs
const WEIGHTS_SHARE = 0.9; // of the rest
const START_COMMAND = "export EMBERLINE_ADMIN_KEY=$(openssl rand -hex 32)\necho $EMBERLINE_ADMIN_KEY\nemberline serve MODEL";

export class ModelsDialog {
  /** `onChanged()` is called after the list of served models has changed. */
  constructor(onChanged) {
    this.onChanged = onChanged;
    this.management = new ModelManagement(() => this.keyInput.value.trim());
    this.timer = 0;
    this.toConfirm = ""; // name of the model whose removal the user has to confirm
    this.busy = new Set(); // names of models that are being unloaded or removed
    this.listed = null;
    this.node = this.build();
  }

  build() {
    this.keyInput = element("input", {
      name: "admin_key",
      type: "password",
      autocomplete: "off",
      spellcheck: false,
      value: sessionStorage.getItem(STORAGE_KEY) ?? "",
    });
    this.keyForm = element(
      "form",
      { id: "admin-key" },
      element("label", {}, "Admin key", this.keyInput),
      element("button", { type: "submit", className: "small-button" }, "Show models"),
    );
    this.keyForm.onsubmit = (event) => {
      event.preventDefault();
      this.refresh();
    };
    this.notice = element("div", { id: "models-notice", role: "status", hidden: true });
    this.nameInput = element("input", {
      name: "model",
      required: true,
      placeholder: "qwen3-0.6b, or hf:org/name:Q4_K_M",
      spellcheck: false,
      autocomplete: "off",
    });
    const loadForm = element(
      "form",
      { id: "load-model" },
      element("label", {}, "Any model by its name", this.nameInput),
      element("button", { type: "submit", className: "small-button", value: "load" }, "Load"),
      element("button", { type: "submit", className: "small-button", value: "pull" }, "Only pull"),
    );
    loadForm.onsubmit = (event) => {
      event.preventDefault();
      this.follow(event.submitter?.value || "load", this.nameInput.value.trim());
    };
    this.works = element("div", { id: "model-works", ariaLive: "polite" });
    this.memory = element("select", { name: "memory", onchange: () => this.draw() });
    this.device = element(
      "select",
      { name: "device", onchange: () => this.draw() },
      new Option("CPU, quantised", "cpu"),
      new Option("GPU, full precision", "gpu"),
    );
    this.tables = Object.fromEntries(
      ["served", "cached", "pulling", "catalogue"].map((name) => [
        name,
        element("div", { className: "rows", data: { models: name } }),
      ]),
    );
    this.content = element(
      "div",
      { id: "models-content", hidden: true },
      loadForm,
      this.works,
      section("Served", "requests can use them", this.tables.served),
      section("On the disk", "loading them needs no download", this.tables.cached),
      section("Downloads", "of all clients", this.tables.pulling),
      section(
        "Which model for which memory",
        "weights fit, with room for the KV cache; the largest first",
        element(
          "div",
          { className: "choose" },
          element("label", {}, "Memory", this.memory),
          element("label", {}, "Runs on", this.device),
        ),
        this.tables.catalogue,
      ),
    );
    const close = element(
      "button",
      { type: "button", className: "icon", title: "Close", ariaLabel: "Close", onclick: () => this.node.close() },
      "×",
    );
    const title = element("header", {}, element("h2", { id: "models-title" }, "Models"), close);
    const node = element("dialog", { className: "models", id: "models" }, title, this.keyForm, this.notice, this.content);
    node.setAttribute("aria-labelledby", "models-title");
    node.addEventListener("close", () => clearTimeout(this.timer));
    return node;
  }

  open() {
    this.node.showModal();
    this.refresh();
  }

  /** Load the lists, and again every few seconds while the dialog is open. */
  async refresh() {
    clearTimeout(this.timer);
    try {
      const listed = await this.management.list();
      sessionStorage.setItem(STORAGE_KEY, this.keyInput.value.trim());
      this.show(listed);
    } catch (error) {
      this.showProblem(error);
      if (error.status === 401 || error.status === 403 || error.status === 404) return; // until the user does something
    }
    clearTimeout(this.timer);
    if (this.node.open) this.timer = setTimeout(() => this.refresh(), POLL_MS);
  }

  show(listed) {
    this.notice.hidden = this.keyForm.hidden = true;
    this.content.hidden = false;
    if (!this.listed) this.offerMemory(listed.available_bytes);
    if (JSON.stringify(listed) === JSON.stringify(this.listed)) return; // do not take away what the user points at
    this.listed = listed;
    this.draw();
  }

  showProblem(error) {
    this.content.hidden = true;
    this.notice.hidden = this.keyForm.hidden = false;
    this.listed = null;
    if (error.status === 403) {
      this.notice.replaceChildren(
        element("p", {}, "This server has no admin key, so its models can only be changed on the command line:"),
        element("pre", {}, "emberline list --all\nemberline pull NAME\nemberline rm NAME"),
        element("p", {}, "To pull, load and remove models here, start the server with a key of your own, and enter it above:"),
        element("pre", {}, START_COMMAND),
      );
      return;
    }
    const hasKey = this.keyInput.value.trim();
    const text =
      error.status === 401
        ? hasKey
          ? "Wrong admin key. It is the value of EMBERLINE_ADMIN_KEY, or of --admin-key, at the start of the server. API keys do not count."
          : "Enter the admin key: the value of EMBERLINE_ADMIN_KEY, or of --admin-key, at the start of the server."
        : error.status === 404
          ? "This server cannot change its models at run time."
          : `${error.title}. ${error.message}`;
    this.notice.replaceChildren(element("p", {}, text));
    if (error.status === 401) this.keyInput.focus();
  }

  offerMemory(available) {
    const options = MEMORY_GB.map((size) => new Option(`${size} GB`, String(size * 1e9)));
    if (available) options.unshift(new Option(`left on this machine: ${gigabytes(available)}`, String(available)));
    this.memory.replaceChildren(...options);
  }

  draw() {
    const { served, cached, pulling, catalogue } = this.listed;
    const sources = new Set(served.map(({ source }) => source));
    this.tables.served.replaceChildren(
      table(
        ["Model", "Context", "Open requests", ""],
        served.map((model) => [
          entry(model.name, model.source === model.name ? "" : model.source),
          `${model.context.toLocaleString("en-US")} tokens`,
          String(model.open_requests),
          model.can_unload
            ? this.button("Unload", model.name, () => this.change("unload", model.name))
            : element("small", {}, "named at the start"),
        ]),
        "",
        ["", "", "extra", ""],
      ),
    );
    this.tables.cached.replaceChildren(
      table(
        ["Model", "Size", ""],
        cached.map(({ name, bytes }) => [
          entry(shortName(name, catalogue) ?? name, shortName(name, catalogue) ? name : ""),
          gigabytes(bytes),
          element(
            "span",
            {},
            served.some(({ source }) => isSource(source, name))
              ? ""
              : this.button("Load", name, () => this.follow("load", shortName(name, catalogue) ?? name)),
            this.toConfirm === name
              ? this.button(`Delete ${gigabytes(bytes)}`, name, () => this.change("remove", name), "dangerous")
              : this.button("Remove", name, () => ((this.toConfirm = name), this.draw())),
          ),
        ]),
        "No model is on the disk.",
      ),
    );
    this.tables.pulling.parentElement.hidden = !pulling.length;
    this.tables.pulling.replaceChildren(
      table(
        ["Model", "Done"],
        pulling.map(({ source, completed, total }) => [entry(source), total ? `${gigabytes(completed)} of ${gigabytes(total)}` : "starting"]),
        "",
      ),
    );
    this.drawCatalogue(sources);
  }

  drawCatalogue(sources) {
    const isGPU = this.device.value === "gpu";
    const weights = (model) => (isGPU ? model.gpu_bytes : model.download_bytes);
    const available = (Number(this.memory.value) - OTHER_MEMORY) * WEIGHTS_SHARE;
    const fitting = this.listed.catalogue.filter((model) => weights(model) <= available);
    fitting.sort((a, b) => weights(b) - weights(a));
    const rows = fitting.map((model) => {
      const name = isGPU ? `${model.name}:safetensors` : model.name;
      return [
        entry(name),
        `${Number((model.parameters / 1e9).toPrecision(3))}B`,
        gigabytes(weights(model)),
        model.context.toLocaleString("en-US"),
        model.licence,
        sources.has(model.source) && !isGPU
          ? element("small", {}, "served")
          : this.button("Load", name, () => this.follow("load", name)),
      ];
    });
    const none = "No model of the catalogue fits. Unload a model, or choose more memory.";
    const titles = ["Model", "Parameters", "Download", "Context", "Licence", ""];
    this.tables.catalogue.replaceChildren(table(titles, rows, none, ["", "", "", "extra", "extra", ""]));
  }

  button(text, name, onclick, more = "") {
    const isBusy = this.busy.has(name);
    return element("button", { type: "button", className: `small-button ${more}`, disabled: isBusy, onclick }, text);
  }

  /** Pull or load a model, with its progress on the page. */
  async follow(action, model) {
    const abort = new AbortController();
    const text = element("span", {}, `${model}: starting`);
    const bar = element("progress", {});
    const end = element("button", { type: "button", className: "small-button" }, "Cancel");
    const node = element("div", { className: "work", data: { state: "open", work: model } }, text, end, bar);
    end.onclick = () => abort.abort();
    this.works.append(node);
    node.scrollIntoView({ block: "nearest" });
    const finish = (state, message) => {
      node.dataset.state = state;
      text.textContent = `${model}: ${message}`;
      bar.remove();
      end.textContent = "Dismiss";
      end.onclick = () => node.remove();
    };
    try {
      for await (const { status = "", completed, total } of this.management.follow(action, model, abort.signal)) {
        const hasSize = Boolean(total);
        text.textContent = hasSize ? `${status}: ${gigabytes(completed)} of ${gigabytes(total)}` : status;
        if (hasSize) Object.assign(bar, { max: total, value: completed });
        else bar.removeAttribute("value"); // moves without a share
      }
      finish("done", action === "load" ? "ready, requests can use it" : "on the disk");
    } catch (error) {
      if (abort.signal.aborted) finish("cancelled", "cancelled; the next pull resumes the download");
      else finish("failed", error.message);
    }
    await this.refresh();
    if (action === "load") this.onChanged();
  }

  async change(action, model) {
    this.toConfirm = "";
    this.busy.add(model);
    this.draw();
    try {
      await this.management[action](model);
    } catch (error) {
      const text = element("span", {}, `${model}: ${error.message}`);
      const dismiss = element("button", { type: "button", className: "small-button" }, "Dismiss");
      const node = element("div", { className: "work", data: { state: "failed", work: model } }, text, dismiss);
      dismiss.onclick = () => node.remove();
      this.works.append(node);
      node.scrollIntoView({ block: "nearest" });
    }
    this.busy.delete(model);
    this.listed = null; // draw again
    await this.refresh();
    if (action === "unload") this.onChanged();
  }
}

const section = (title, about, ...content) =>
  element("section", {}, element("h3", {}, `${title} `, element("small", {}, about)), ...content);

const entry = (name, more = "") =>
  more ? element("span", {}, name, " ", element("small", {}, more)) : element("span", {}, name);

/** Return whether a source such as hf:org/name:Q8_0 stands for a model on the disk, such as hf:org/name/name-Q8_0.gguf. */
function isSource(source, cachedName) {
  const [, repository, tag] = /^(hf:[^:@]+):([^@]+)/.exec(source) ?? [];
  if (!tag) return source === cachedName;
  return cachedName.startsWith(`${repository}/`) && cachedName.toUpperCase().includes(tag.toUpperCase());
}

/** Return the catalogue's name of a model on the disk; undefined if it has none. */
const shortName = (cachedName, catalogue) => catalogue.find(({ source }) => isSource(source, cachedName))?.name;

function table(titles, rows, none, classes = []) {
  if (!rows.length) return element("p", { className: "note" }, none);
  const className = (i) => classes[i] ?? "";
  const head = titles.map((title, i) => element("th", { scope: "col", className: className(i) }, title));
  const lines = rows.map((row) =>
    element("tr", {}, ...row.map((cell, i) => element("td", { className: className(i) }, cell))),
  );
  return element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...lines));
}

function gigabytes(bytes) {
  if (bytes < 1e9) return `${Math.round(bytes / 1e6)} MB`;
  return `${(bytes / 1e9).toFixed(bytes < 1e10 ? 1 : 0)} GB`;
}
