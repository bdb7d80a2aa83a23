/** The playground page: connects the conversation, its transcript, the settings and the load charts. */

import { Conversation } from "./conversation.js";
import { element } from "./dom.js";
import { Generation } from "./generation.js";
import { Load } from "./load.js";
import { Settings } from "./settings.js";
import { Transcript } from "./transcript.js";
import { models, samplingDefaults } from "./wire.js";
import { wireTheme } from "./theme.js";

const $ = (id) => document.getElementById(id);

class Playground {
  constructor() {
    this.conversation = new Conversation(localStorage);
    this.settings = new Settings($("settings"), localStorage, sessionStorage);
    this.transcript = new Transcript($("transcript"), $("scroll"), $("latest"), { regenerate: () => this.regenerate() });
    this.load = new Load($("charts"), $("facts"), () => this.settings.key, (stats, detail) => this.showState(stats, detail));
    this.generation = null;
    this.restarts = null;
    this.wire();
    this.refresh();
    this.load.run();
  }

  wire() {
    $("composer").onsubmit = (event) => {
      event.preventDefault();
      this.send($("prompt").value);
    };
    $("prompt").oninput = () => this.fit();
    $("prompt").onkeydown = (event) => this.handleKey(event);
    $("stop").onclick = () => this.generation?.stop();
    $("clear").onclick = () => this.clear();
    $("settings").key.onchange = () => this.listModels();
    for (const starter of document.querySelectorAll(".starters button")) starter.onclick = () => this.send(starter.textContent);
    addEventListener("pagehide", () => this.conversation.save());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.generation?.stop();
      if (event.key === "/" && !event.target.matches("input, textarea, select")) {
        event.preventDefault();
        $("prompt").focus();
      }
    });
  }

  handleKey(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      $("composer").requestSubmit();
    }
    if (event.key === "ArrowUp" && !$("prompt").value) {
      const lastQuestion = this.conversation.turns.findLast((turn) => turn.role === "user");
      if (!lastQuestion) return;
      event.preventDefault();
      $("prompt").value = lastQuestion.content;
      this.fit();
    }
  }

  send(text) {
    if (this.generation || !text.trim()) return;
    const body = this.body();
    if (!body) return;
    $("prompt").value = "";
    this.fit();
    this.generate(body, this.conversation.addQuestion(text));
  }

  regenerate() {
    if (this.generation) return;
    const body = this.body();
    if (body) this.generate(body, this.conversation.addAnswer());
  }

  body() {
    const body = this.settings.request();
    if (!body) {
      openPanel(true);
      this.settings.reportInvalid();
    }
    return body;
  }

  async generate(body, answer) {
    body.messages = this.conversation.messages(this.settings.system);
    this.generation = new Generation(answer, body, this.settings.key);
    this.conversation.save();
    this.refresh();
    this.transcript.follow(true);
    let drawing = 0; // at most one redraw per frame, however fast tokens arrive
    const draw = () => {
      drawing = 0;
      this.transcript.update(answer);
    };
    await this.generation.run(() => (drawing ||= requestAnimationFrame(draw)));
    this.generation = null;
    this.refresh();
    this.transcript.update(answer);
    if (!this.conversation.save()) toast("This conversation is too large for the browser's storage and will be lost on reload.");
    if (answer.error?.status === 401) openPanel(true);
  }

  clear() {
    this.generation?.stop();
    const previous = this.conversation.replace([]);
    this.refresh();
    $("prompt").focus();
    if (previous.length) toast("Conversation cleared.", "Undo", () => this.restore(previous));
  }

  restore(turns) {
    this.generation?.stop();
    this.conversation.replace(turns);
    this.refresh();
  }

  refresh() {
    const busy = this.generation !== null;
    $("welcome").hidden = this.conversation.turns.length > 0;
    $("send").hidden = busy;
    $("stop").hidden = !busy;
    $("log").ariaBusy = String(busy); // screen readers read the whole answer, not every token
    document.documentElement.dataset.busy = busy;
    this.transcript.show(this.conversation.turns);
  }

  fit() {
    $("prompt").style.height = "auto";
    $("prompt").style.height = `${$("prompt").scrollHeight}px`;
  }

  async listModels() {
    const names = await models(this.settings.key).catch(() => []);
    this.settings.setModels(names);
    const onModelChange = async () => {
      $("model-name").textContent = this.settings.model;
      if (this.settings.model) this.settings.applyDefaults(await samplingDefaults(this.settings.key, this.settings.model).catch(() => ({})));
    };
    $("settings").model.onchange = onModelChange;
    await onModelChange();
  }

  showState(stats, detail) {
    const state = stats?.engine_state ?? (detail.status === 401 ? "locked" : "offline");
    if ($("engine").dataset.state !== state) {
      $("engine").dataset.state = state;
      $("engine").textContent = state;
      if (stats) this.listModels(); // the server has started or restarted, perhaps with another model
    }
    if (!stats) return heat(0);
    if (stats.engine_restarts > (this.restarts ?? Infinity)) toast("The engine has restarted. Open answers ended with an error.");
    this.restarts = stats.engine_restarts;
    heat(stats.running ? 0.35 + 0.65 * Math.min(1, Math.log10(1 + (detail.generated ?? 0)) / 3) : 0);
  }
}

/** Set the brightness of the line under the header: the speed of the engine, logarithmic in tokens per second. */
const heat = (value) => document.documentElement.style.setProperty("--heat", value.toFixed(2));

function toast(message, label, action) {
  const close = () => ($("toast").hidden = true);
  const button = label && element("button", { type: "button", className: "link", onclick: () => (action(), close()) }, label);
  $("toast").replaceChildren(...[message, button].filter(Boolean));
  $("toast").hidden = false;
  clearTimeout(toast.timer);
  toast.timer = setTimeout(close, 6000);
}

const narrow = matchMedia("(max-width: 60rem)");

function openPanel(open) {
  document.documentElement.dataset.panel = open ? "open" : "closed";
  $("panel").inert = !open;
  $("panel-toggle").ariaExpanded = String(open);
}

function wirePanel() {
  const isOpen = () => document.documentElement.dataset.panel === "open";
  openPanel(!narrow.matches);
  narrow.onchange = () => openPanel(!narrow.matches);
  $("panel-toggle").onclick = () => openPanel(!isOpen());
  document.addEventListener("keydown", (event) => event.key === "Escape" && narrow.matches && openPanel(false));
  $("scroll").addEventListener("click", () => narrow.matches && openPanel(false));
}

wireTheme($("theme"));
wirePanel();
new Playground();
