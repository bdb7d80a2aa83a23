/** Transcript: shows the conversation, one list item per turn. */

import { copyButton, element, iconButton } from "./dom.js";
import { render } from "./markdown.js";

const ENDINGS = { stopped: "stopped here", length: "reached max tokens", failed: "incomplete" };

export class Transcript {
  /** `actions`: regenerate(), edit(turn, text), setToolResult(turn, tool, text), detailNodes(turn) */
  constructor(root, scroller, latest, actions) {
    Object.assign(this, { root, scroller, latest, actions });
    this.views = new Map(); // turn -> its view
    this.pinned = true; // follow new text until the user scrolls up
    scroller.addEventListener("scroll", () => this.watch(), { passive: true });
    latest.onclick = () => this.follow(true);
    new ResizeObserver(() => this.follow()).observe(scroller);
  }

  /** Show exactly these turns. */
  show(turns) {
    for (const [turn, view] of this.views) {
      if (turns.includes(turn)) continue;
      view.node.remove();
      this.views.delete(turn);
    }
    for (const turn of turns) if (!this.views.has(turn)) this.add(turn);
    this.root.querySelector(".last")?.classList.remove("last");
    this.root.lastElementChild?.classList.add("last");
    this.follow();
  }

  add(turn) {
    const view = turn.role === "user" ? new QuestionView(turn, this.actions) : new AnswerView(turn, this.actions);
    this.views.set(turn, view);
    this.root.append(view.node);
  }

  update(turn) {
    this.views.get(turn)?.update();
    this.follow();
  }

  follow(force = false) {
    if (force) this.pinned = true;
    if (this.pinned) this.scroller.scrollTop = this.scroller.scrollHeight;
    this.watch();
  }

  watch() {
    const { scrollTop, scrollHeight, clientHeight } = this.scroller;
    this.pinned = scrollHeight - scrollTop - clientHeight < 48;
    this.latest.hidden = this.pinned;
  }
}

class QuestionView {
  constructor(turn, actions) {
    Object.assign(this, { turn, actions });
    this.node = element("li", { className: "turn user" });
    this.update();
  }

  update() {
    const edit = iconButton("edit", "Edit and send again", () => this.edit());
    this.node.replaceChildren(edit, element("p", {}, screenReaderText("You: "), this.turn.content));
  }

  edit() {
    const text = element("textarea", {
      className: "edited",
      value: this.turn.content,
      rows: 3,
      ariaLabel: "Edited message",
    });
    const send = element("button", { type: "submit", className: "small-button" }, "Send again");
    const cancel = element("button", { type: "button", className: "link", onclick: () => this.update() }, "Cancel");
    const form = element(
      "form",
      { className: "edit" },
      text,
      element("p", {}, "The answers after this message are removed. "),
      send,
      cancel,
    );
    form.onsubmit = (event) => {
      event.preventDefault();
      if (text.value.trim()) this.actions.edit(this.turn, text.value);
    };
    text.onkeydown = (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing)
        (event.preventDefault(), form.requestSubmit());
      if (event.key === "Escape") (event.stopPropagation(), this.update());
    };
    this.node.replaceChildren(form);
    text.focus();
  }
}

class AnswerView {
  constructor(turn, actions) {
    this.turn = turn;
    this.actions = actions;
    this.thoughts = element("p");
    this.thinking = element(
      "details",
      { className: "thinking", hidden: true },
      element("summary", {}, "Reasoning"),
      this.thoughts,
    );
    this.text = element("div", { className: "text" });
    this.tools = element("div", { className: "tools", hidden: true });
    this.mark = element("span", { className: "ending", hidden: true });
    this.metrics = element("dl", { className: "metrics" });
    this.details = element("span", { className: "details" });
    this.notice = element("div", { className: "notice", role: "alert", hidden: true });
    this.buttons = element(
      "div",
      { className: "actions" },
      copyButton(() => turn.content, "Copy the answer"),
      iconButton("again", "Regenerate the answer", () => actions.regenerate()),
    );
    this.foot = element("div", { className: "foot" }, this.mark, this.metrics, this.details, this.buttons);
    this.node = element(
      "li",
      { className: "turn answer" },
      screenReaderText("The model: "),
      this.thinking,
      this.text,
      this.tools,
      this.notice,
      this.foot,
    );
    this.update();
  }

  update() {
    const { turn } = this;
    this.node.dataset.ending = turn.ending;
    this.thinking.hidden = !turn.reasoning;
    this.thinking.open ||= turn.ending === "open" && Boolean(turn.reasoning) && !turn.content;
    this.thoughts.textContent = turn.reasoning;
    render(this.text, shownText(turn));
    this.showTools();
    this.mark.hidden = !(turn.ending in ENDINGS) || !turn.content;
    this.mark.textContent = ENDINGS[turn.ending] ?? "";
    this.buttons.hidden = turn.ending === "open";
    this.foot.hidden = turn.ending !== "open" && !turn.content && !turn.tools.length && turn.error !== null; // the error notice is enough
    this.metrics.replaceChildren(...metricNodes(turn.metrics));
    this.details.replaceChildren(...this.actions.detailNodes(turn));
    this.warn(turn.error);
  }

  /** Show each tool call, with its result or a field for it. Cards are built again only when a call has changed. */
  showTools() {
    const { tools, ending } = this.turn;
    const key = JSON.stringify([tools, ending]);
    if (key === this.shownTools) return;
    this.shownTools = key;
    this.tools.hidden = !tools.length;
    this.tools.replaceChildren(...tools.map((tool) => this.toolCard(tool, ending === "open")));
  }

  toolCard(tool, isOpen) {
    const call = element(
      "div",
      { className: "tool-call" },
      element("b", {}, tool.name),
      element("code", {}, tool.arguments),
    );
    if (isOpen) return element("div", { className: "tool" }, call);
    if (tool.result !== undefined)
      return element(
        "div",
        { className: "tool" },
        call,
        element("div", { className: "tool-result" }, element("small", {}, "result"), element("code", {}, tool.result)),
      );
    const input = element("input", {
      type: "text",
      placeholder: "the tool's result",
      ariaLabel: `Result of ${tool.name}`,
    });
    const form = element(
      "form",
      { className: "tool-result" },
      input,
      element("button", { type: "submit", className: "small-button" }, "Send result"),
    );
    form.onsubmit = (event) => (event.preventDefault(), this.actions.setToolResult(this.turn, tool, input.value));
    return element("div", { className: "tool" }, call, form);
  }

  warn(error) {
    if (!error || !this.notice.hidden) return;
    const retry = element(
      "button",
      { type: "button", className: "retry", onclick: () => this.actions.regenerate() },
      "Try again",
    );
    const wait = error.retryAfter ? element("p", { className: "wait" }) : null;
    const title = element("strong", {}, error.status ? `${error.title} (${error.status})` : error.title);
    this.notice.append(...[title, element("p", {}, error.message), wait, retry].filter(Boolean));
    this.notice.hidden = false;
    if (wait) countdown(wait, error.retryAfter);
  }
}

function countdown(node, seconds) {
  const until = performance.now() + seconds * 1000;
  const tick = () => {
    const left = Math.ceil((until - performance.now()) / 1000);
    node.textContent = left > 0 ? `The server asks clients to wait ${left} s.` : "You can retry now.";
    if (left > 0 && node.isConnected) setTimeout(tick, 250);
  };
  setTimeout(tick); // after the node is in the page
}

/** Text for screen readers only: the author of a turn. */
const screenReaderText = (text) => element("span", { className: "sr" }, text);

/** The text of an answer. JSON is shown as a code block, indented when it is complete. */
function shownText({ content, ending }) {
  if (!/^\s*[{[]/.test(content)) return content;
  let shown = content;
  try {
    shown = JSON.stringify(JSON.parse(content), null, 2);
  } catch {
    if (ending === "complete") return content; // not JSON after all
  }
  return `\`\`\`\`json\n${shown}\n\`\`\`\``;
}

function metricNodes({ ttft, rate, prompt, cached, completion, accepted, drafted, seconds, exact }) {
  if (ttft === undefined) return [];
  const approximate = exact ? "" : "≈ ";
  const nodes = [
    metric("ttft", "TTFT", duration(ttft), "time to first token, measured in this browser"),
    rate && metric("rate", "speed", `${approximate}${number(rate)} tok/s`, "tokens per second after the first token"),
    metric(
      "completion",
      "tokens",
      `${approximate}${completion}`,
      exact ? "tokens generated" : "estimated while streaming; exact at the end",
    ),
  ];
  if (prompt !== undefined) {
    const share = element("span", { className: "share" });
    share.style.setProperty("--share", cached / prompt);
    nodes.push(metric("prompt", "prompt", String(prompt), "prompt tokens"));
    nodes.push(metric("cached", "cached", String(cached), "prompt tokens served from the prefix cache", share));
  }
  if (drafted)
    nodes.push(
      metric(
        "accepted",
        "accepted",
        `${accepted} / ${drafted}`,
        "drafted tokens that were right, of all drafted tokens",
      ),
    );
  nodes.push(metric("seconds", "total", duration(seconds), "from the request to the last token"));
  return nodes.filter(Boolean);
}

function metric(name, label, value, title, extra) {
  return element("div", { title }, element("dt", {}, label), element("dd", { data: { metric: name } }, value, extra));
}

const number = (value) => value.toFixed(value < 100 ? 1 : 0);
const duration = (seconds) => (seconds < 1 ? `${Math.round(seconds * 1000)} ms` : `${seconds.toFixed(2)} s`);
