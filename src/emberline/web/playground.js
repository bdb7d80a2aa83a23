/** Playground: conversations with a model. It is used by the engine's page and by the gateway's dashboard. */

import { Conversations, hasResults } from "./conversation.js";
import { copyButton, element, icon, iconButton } from "./dom.js";
import { Generation } from "./generation.js";
import { highlight } from "./highlight.js";
import { Settings } from "./settings.js";
import { curl, python } from "./snippets.js";
import { isExampleTool, runExampleTool } from "./tools.js";
import { Transcript } from "./transcript.js";

const MAX_TOOL_ROUNDS = 8; // answers in a row that run tools without the user
const STARTERS = [
  "Name the capital of France.",
  "Explain what a KV cache is to a curious student.",
  "Write a Python function that reverses a string.",
  "Give me three names for a lighthouse cat.",
];
const SNIPPETS = [
  ["curl", "curl", "sh", curl],
  ["python", "Python", "python", python],
];

export class Playground {
  /** `endpoint`: an Endpoint. `storageKey`: name of what is kept in the browser's storage. `modelInput`: a select or a text input.
      `fields`: further labels of the settings. `panelTop`: nodes above the settings. `snippetAddress()`: { base, key, headers } of
      program text. `detailNodes(turn)`: what to show about an answer. `onAnswer(turn)` is called after each answer; if it returns
      a promise, the answer is drawn again when that is fulfilled. */
  constructor({
    endpoint,
    storageKey,
    modelInput,
    fields = [],
    panelTop = [],
    snippetAddress,
    detailNodes = () => [],
    onAnswer = () => {},
    about,
  }) {
    Object.assign(this, { endpoint, snippetAddress, onAnswer, generation: null, toolRounds: 0 });
    this.conversations = new Conversations(localStorage, `${storageKey}.conversations`);
    this.settings = new Settings({
      storage: localStorage,
      session: sessionStorage,
      storageKey: `${storageKey}.settings`,
      modelInput,
      fields,
    });
    this.node = this.build(panelTop, about);
    const actions = {
      regenerate: () => this.regenerate(),
      edit: (turn, text) => this.edit(turn, text),
      setToolResult: (turn, tool, text) => this.setToolResult(turn, tool, text),
      detailNodes,
    };
    this.transcript = new Transcript(this.list, this.scroller, this.latest, actions);
    this.wire();
    this.refresh();
  }

  get conversation() {
    return this.conversations.current;
  }

  build(panelTop, about) {
    this.picker = element("select", { id: "conversation", ariaLabel: "Conversation" });
    this.panelToggle = iconButton("panel", "Settings", () => this.openPanel(!this.isPanelOpen));
    Object.assign(this.panelToggle, { id: "panel-toggle" });
    this.panelToggle.setAttribute("aria-controls", "panel");
    const create = iconButton("plus", "New conversation", () => this.create());
    create.id = "new";
    const remove = iconButton("new", "Delete the conversation", () => this.remove());
    remove.id = "clear";
    const code = iconButton("code", "This request as curl or Python", () => this.showCode());
    code.id = "code";
    const toolbar = element(
      "div",
      { className: "toolbar" },
      this.picker,
      create,
      remove,
      code,
      element("span", { className: "spacer" }),
      this.panelToggle,
    );
    this.list = element("ol", { className: "transcript", id: "transcript" });
    this.log = element("div", { id: "log", role: "log", ariaLabel: "Conversation", ariaBusy: "false" }, this.list);
    const starters = STARTERS.map((text) =>
      element("li", {}, element("button", { type: "button", onclick: () => this.send(text) }, text)),
    );
    this.welcome = element(
      "section",
      { className: "welcome", id: "welcome", ariaLabel: "Start" },
      element("h2", {}, "Chat with the model"),
      element("p", {}, about),
      element("ul", { className: "starters" }, ...starters),
    );
    this.scroller = element("div", { className: "scroll", id: "scroll", tabIndex: -1 }, this.welcome, this.log);
    this.latest = element("button", { className: "latest", id: "latest", type: "button", hidden: true }, "Latest ↓");
    this.prompt = element("textarea", {
      id: "prompt",
      rows: 1,
      placeholder: "Message the model",
      ariaLabel: "Message",
    });
    this.problem = element("p", {
      className: "composer-problem invalid",
      id: "composer-problem",
      role: "alert",
      hidden: true,
    });
    this.sendButton = element(
      "button",
      { className: "send", id: "send", type: "submit", ariaLabel: "Send", title: "Send (Enter)" },
      icon("send"),
    );
    this.stopButton = element(
      "button",
      {
        className: "send stop",
        id: "stop",
        type: "button",
        ariaLabel: "Stop the answer",
        title: "Stop (Esc)",
        hidden: true,
      },
      icon("stop"),
    );
    this.composer = element(
      "form",
      { className: "composer", id: "composer", autocomplete: "off" },
      this.prompt,
      this.sendButton,
      this.stopButton,
    );
    const keys = element("p", { className: "keys", id: "keys" }, ...keyHelp());
    const chat = element("div", { className: "chat" }, this.scroller, this.latest, this.problem, this.composer, keys);
    this.panel = element(
      "aside",
      { className: "panel", id: "panel", ariaLabel: "Settings" },
      ...panelTop,
      this.settings.form,
    );
    this.dialog = element("dialog", { className: "code-dialog", id: "code-dialog", ariaLabel: "Program text" });
    return element("div", { className: "playground" }, toolbar, chat, this.panel, this.dialog);
  }

  wire() {
    const narrow = matchMedia("(max-width: 60rem)");
    this.openPanel(!narrow.matches);
    narrow.addEventListener("change", () => this.node.isConnected && this.openPanel(!narrow.matches));
    this.scroller.addEventListener("click", () => narrow.matches && this.openPanel(false));
    this.composer.onsubmit = (event) => {
      event.preventDefault();
      this.send(this.prompt.value);
    };
    this.prompt.oninput = () => this.fit();
    this.prompt.onkeydown = (event) => this.handleKey(event);
    this.stopButton.onclick = () => this.stop();
    this.picker.onchange = () => {
      this.stop();
      this.conversations.select(this.picker.value);
      this.refresh();
      this.transcript.follow(true);
    };
    this.settings.form.addEventListener("input", () => this.showProblem(null));
    this.listeners = new AbortController();
    const { signal } = this.listeners;
    addEventListener("pagehide", () => this.conversations.save(), { signal });
    const onkeydown = (event) => {
      if (event.key === "Escape") (this.stop(), narrow.matches && this.openPanel(false));
      if (event.key === "/" && !event.target.matches("input, textarea, select"))
        (event.preventDefault(), this.prompt.focus());
    };
    document.addEventListener("keydown", onkeydown, { signal });
  }

  /** Stop the answer and leave the page. */
  close() {
    this.stop();
    this.listeners.abort();
    this.conversations.save();
  }

  handleKey(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      this.composer.requestSubmit();
    }
    if (event.key === "ArrowUp" && !this.prompt.value) {
      const lastQuestion = this.conversation.turns.findLast((turn) => turn.role === "user");
      if (!lastQuestion) return;
      event.preventDefault();
      this.prompt.value = lastQuestion.content;
      this.fit();
    }
  }

  async listModels() {
    this.settings.setModels(await this.endpoint.models().catch(() => []));
  }

  stop() {
    this.toolRounds = MAX_TOOL_ROUNDS; // no further tool calls of this answer
    this.generation?.stop();
  }

  send(text) {
    if (this.generation || !text.trim()) return;
    const body = this.body();
    if (!body) return;
    this.prompt.value = "";
    this.fit();
    this.toolRounds = 0;
    this.generate(body, this.conversation.addQuestion(text));
  }

  regenerate() {
    if (this.generation) return;
    const body = this.body();
    this.toolRounds = 0;
    if (body) this.generate(body, this.conversation.replaceAnswer());
  }

  edit(turn, text) {
    if (this.generation || !this.body()) return;
    this.conversation.cutBefore(turn);
    this.send(text);
  }

  setToolResult(turn, tool, text) {
    tool.result = text;
    this.conversations.save();
    this.transcript.update(turn);
    const body = hasResults(turn) && this.conversation.last === turn && !this.generation && this.body();
    if (body) this.generate(body, this.conversation.addAnswer());
  }

  /** Return the settings of a request; null, with the problem shown, if they cannot be used. */
  body() {
    const problem = this.settings.problem();
    this.showProblem(problem);
    if (!problem) return this.settings.request();
    this.openPanel(true);
    this.settings.reportInvalid(problem);
    return null;
  }

  showProblem(problem) {
    this.problem.hidden = !problem;
    this.problem.textContent = problem ? `Not sent. ${problem.message}` : "";
  }

  async generate(body, answer) {
    const { conversation } = this;
    body.messages = conversation.messages(this.settings.system);
    const generation = (this.generation = new Generation(answer, body, this.endpoint));
    this.conversations.save();
    this.refresh();
    this.transcript.follow(true);
    let drawing = 0; // at most one redraw per frame, however fast tokens arrive
    const draw = () => {
      drawing = 0;
      this.transcript.update(answer);
    };
    await generation.run(() => (drawing ||= requestAnimationFrame(draw)));
    await this.runExampleTools(answer);
    if (this.generation === generation) this.generation = null;
    this.refresh();
    this.transcript.update(answer);
    if (!this.conversations.save())
      toast("This conversation is too large for the browser's storage and will be lost on reload.");
    if (answer.error?.status === 401) this.openPanel(true);
    Promise.resolve(this.onAnswer(answer)).then(() => this.transcript.update(answer));
    this.continueAfterTools(conversation, answer);
  }

  async runExampleTools({ ending, tools }) {
    if (ending !== "complete") return;
    await Promise.all(
      tools
        .filter(({ name }) => isExampleTool(name))
        .map(async (tool) => (tool.result = await runExampleTool(tool.name, tool.arguments))),
    );
  }

  /** Ask for the answer to the results of tools, unless the user has to enter one. */
  continueAfterTools(conversation, answer) {
    const isWaiting = this.conversation === conversation && conversation.last === answer && hasResults(answer);
    if (!isWaiting || this.toolRounds >= MAX_TOOL_ROUNDS) return;
    this.toolRounds += 1;
    const body = this.body();
    if (body) this.generate(body, conversation.addAnswer());
  }

  create() {
    this.stop();
    this.conversations.create();
    this.refresh();
    this.prompt.focus();
  }

  remove() {
    this.stop();
    const removed = this.conversation;
    this.conversations.remove(removed);
    this.refresh();
    this.prompt.focus();
    if (removed.turns.length) toast("Conversation deleted.", "Undo", () => this.restore(removed));
  }

  restore(conversation) {
    this.stop();
    this.conversations.restore(conversation);
    this.refresh();
  }

  refresh() {
    const busy = this.generation !== null;
    const options = this.conversations.items.map(
      ({ id, title }) => new Option(title, id, false, id === this.conversation.id),
    );
    this.picker.replaceChildren(...options);
    this.welcome.hidden = this.conversation.turns.length > 0;
    this.sendButton.hidden = busy;
    this.stopButton.hidden = !busy;
    this.log.ariaBusy = String(busy); // screen readers read the whole answer, not every token
    document.documentElement.dataset.busy = String(busy);
    this.transcript.show(this.conversation.turns);
  }

  fit() {
    this.prompt.style.height = "auto";
    this.prompt.style.height = `${this.prompt.scrollHeight}px`;
  }

  get isPanelOpen() {
    return document.documentElement.dataset.panel === "open";
  }

  openPanel(open) {
    document.documentElement.dataset.panel = open ? "open" : "closed";
    this.panel.inert = !open;
    this.panelToggle.ariaExpanded = String(open);
  }

  /** Show the next request as program text. */
  showCode() {
    const body = this.body();
    if (!body) return;
    const draft = this.prompt.value.trim();
    const messages = [
      ...this.conversation.messages(this.settings.system),
      ...(draft ? [{ role: "user", content: draft }] : []),
    ];
    const request = { ...body, messages: messages.length ? messages : [{ role: "user", content: STARTERS[0] }] };
    const sections = SNIPPETS.map(([id, title, language, write]) => {
      const text = write(this.snippetAddress(), request);
      const bar = element(
        "div",
        { className: "code-bar" },
        element("span", {}, title),
        copyButton(() => text, "Copy the code"),
      );
      return element(
        "div",
        { className: "code", data: { snippet: id } },
        bar,
        element("pre", { tabIndex: 0 }, element("code", {}, ...highlight(text, language))),
      );
    });
    const close = element(
      "button",
      { type: "button", className: "icon", title: "Close", ariaLabel: "Close", onclick: () => this.dialog.close() },
      "×",
    );
    this.dialog.replaceChildren(
      element("header", {}, element("h2", {}, "This request in a program"), close),
      ...sections,
    );
    this.dialog.showModal();
  }
}

function keyHelp() {
  const key = (name) => element("kbd", {}, name);
  return [
    key("Enter"),
    " sends, ",
    key("Shift Enter"),
    " starts a new line, ",
    key("Esc"),
    " stops the answer, ",
    key("/"),
    " focuses this box, ",
    key("↑"),
    " recalls the last message",
  ];
}

export function toast(message, label, action) {
  const node = document.getElementById("toast");
  const close = () => (node.hidden = true);
  const button =
    label && element("button", { type: "button", className: "link", onclick: () => (action(), close()) }, label);
  node.replaceChildren(...[message, button].filter(Boolean));
  node.hidden = false;
  clearTimeout(toast.timer);
  toast.timer = setTimeout(close, 6000);
}
