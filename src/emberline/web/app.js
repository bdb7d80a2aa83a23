/** The engine's page: the playground, the charts of the engine's load, and its state in the header. */

import { element } from "./dom.js";
import { Load } from "./load.js";
import { Playground, toast } from "./playground.js";
import { wireTheme } from "./theme.js";
import { ModelsDialog } from "./models.js";
import { bearer, EngineEndpoint } from "./wire.js";

const PLACEHOLDER_KEY = "YOUR_KEY";
const $ = (id) => document.getElementById(id);

class EnginePage {
  constructor() {
    this.keyInput = element("input", {
      name: "key",
      type: "password",
      placeholder: "none",
      autocomplete: "off",
      spellcheck: false,
    });
    this.charts = element("div", { className: "charts", id: "charts" });
    this.facts = element("p", { className: "facts", id: "facts" });
    const title = element("h2", { id: "load-title" }, "Load ", element("small", {}, "last 60 s"));
    this.restarts = null;
    this.playground = new Playground({
      endpoint: new EngineEndpoint({ headers: () => bearer(this.key) }),
      storageKey: "emberline",
      modelInput: element("select"),
      fields: [element("label", { className: "wide" }, "API key", this.keyInput)],
      panelTop: [element("section", { ariaLabel: "Load" }, title, this.charts, this.facts)],
      snippetAddress: () => ({
        base: new URL("v1", document.baseURI.split("#")[0]).href,
        key: this.key && PLACEHOLDER_KEY,
      }),
      about: "Answers stream from the engine on this server. Each one shows its latency, speed and token counts.",
    });
    $("playground").append(this.playground.node);
    const models = new ModelsDialog(() => this.listModels());
    $("playground").append(models.node);
    $("models-open").onclick = () => models.open();
    this.playground.settings.form.model.addEventListener("input", () => this.showModel());
    this.keyInput.addEventListener("change", () => this.listModels());
    this.playground.prompt.focus();
    new Load(
      this.charts,
      this.facts,
      () => this.key,
      (stats, detail) => this.showState(stats, detail),
    ).run();
  }

  get key() {
    return this.keyInput.value.trim();
  }

  async listModels() {
    await this.playground.listModels();
    this.showModel();
  }

  showModel() {
    $("model-name").textContent = this.playground.settings.model;
  }

  showState(stats, detail) {
    const state = stats?.engine_state ?? (detail.status === 401 ? "locked" : "offline");
    if ($("engine").dataset.state !== state) {
      $("engine").dataset.state = state;
      $("engine").textContent = state;
      if (stats) this.listModels(); // the server has started or restarted, perhaps with another model
    }
    if (!stats) return heat(0);
    $("dashboard").hidden = !/^https?:/.test(stats.dashboard ?? "");
    if (!$("dashboard").hidden) $("dashboard").href = stats.dashboard;
    if (stats.engine_restarts > (this.restarts ?? Infinity))
      toast("The engine has restarted. Open answers ended with an error.");
    this.restarts = stats.engine_restarts;
    heat(stats.running ? 0.35 + 0.65 * Math.min(1, Math.log10(1 + (detail.generated ?? 0)) / 3) : 0);
  }
}

/** Set the brightness of the line under the header: the speed of the engine, logarithmic in tokens per second. */
const heat = (value) => document.documentElement.style.setProperty("--heat", value.toFixed(2));

wireTheme($("theme"));
new EnginePage();
