/** The playground: a conversation with any model, streamed through the gateway itself, and what each answer was. */

import { element } from "../dom.js";
import { events } from "../wire.js";
import { answered } from "./api.js";
import { count, millis, money } from "./figures.js";
import { button, field, head, link, pill } from "./parts.js";

const LOG_TRIES = 10; // the record is written a moment after the answer
const LOG_PAUSE = 300; // ms

export async function playground(session, where) {
  return new Playground(session, where).open();
}

class Playground {
  constructor(session, where) {
    Object.assign(this, { session, where, messages: [], running: null });
    this.talk = element("ol", { className: "talk", id: "talk", role: "log", ariaLabel: "Conversation" });
    this.names = element("datalist", { id: "models" });
    this.prompt = element("textarea", { id: "prompt", rows: 3, placeholder: "Say something", ariaLabel: "Message" });
    this.send = element("button", { type: "submit", className: "primary", id: "send" }, "Send");
    this.stop = button("Stop", () => this.running?.abort());
    this.stop.id = "stop";
    this.stop.hidden = true;
    const gateways = where.gateways.map((name) => [name, name]);
    this.model = field({ name: "model", label: "Model", required: true, placeholder: "provider/model", id: "model" });
    this.model.control.setAttribute("list", "models");
    this.gateway = field({ name: "gateway", label: "Gateway", kind: "select", options: gateways, value: session.gateway || "default" });
    this.system = field({ name: "system", label: "System prompt", kind: "area", rows: 3 });
    this.most = field({ name: "most", label: "Max tokens", kind: "number", min: 1, value: 512 });
    this.temperature = field({ name: "temperature", label: "Temperature", kind: "number", min: 0, max: 2, step: 0.1, placeholder: "as the model has it" });
    this.fresh = field({ name: "fresh", label: "Do not answer from the cache", kind: "check" });
  }

  async open() {
    this.suggest();
    this.gateway.control.addEventListener("change", () => this.suggest());
    const clear = button("New conversation", () => {
      this.running?.abort();
      this.messages = [];
      this.talk.replaceChildren();
      this.prompt.focus();
    });
    const form = element("form", { className: "talker" }, this.prompt, element("div", { className: "buttons" }, this.stop, this.send));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.say();
    });
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) event.preventDefault(), form.requestSubmit();
      if (event.key === "Escape") this.running?.abort();
    });
    this.where.signal.addEventListener("abort", () => this.running?.abort());
    const wishes = element("section", { className: "card fields", id: "wishes" }, this.model, this.names, this.gateway, this.most, this.temperature, this.fresh, element("div", { className: "wide" }, this.system));
    return element("div", {}, head("Playground", "Through the gateway, with your token: limits, cache, routes and logs are as for everybody.", clear), wishes, element("section", { className: "card" }, this.talk, form));
  }

  /** Names to choose from; others may be written. */
  async suggest() {
    const gateway = this.gateway.control.value;
    const headers = { ...this.session.api.headers, "cf-aig-gateway-id": gateway };
    if (this.session.account !== "default") return; // the list is of that account only
    const served = answered("v1/models", { headers, signal: this.where.signal }, this.where.signal).then((reply) => reply.json());
    const [models, routes] = await Promise.all([served.catch(() => ({ data: [] })), this.session.api.all("routes", this.where.signal).catch(() => [])]);
    const names = [...models.data.filter(({ kind = "chat" }) => kind === "chat").map(({ id }) => id), ...routes.filter(({ deployed }) => deployed !== null).map(({ name }) => `dynamic/${name}`)];
    this.names.replaceChildren(...names.map((name) => element("option", { value: name })));
    if (document.activeElement !== this.model.control) this.model.control.value ||= names[0] ?? ""; // who writes is left alone
  }

  async say() {
    const text = this.prompt.value.trim();
    if (!text || this.running || !this.model.control.reportValidity()) return;
    this.prompt.value = "";
    const messages = this.messages; // a new conversation has its own
    messages.push({ role: "user", content: text });
    this.talk.append(turn("user", text).node);
    const reply = turn("assistant", "");
    this.talk.append(reply.node);
    this.prompt.scrollIntoView({ block: "nearest" });
    this.running = new AbortController();
    this.stop.hidden = false;
    this.send.disabled = true;
    try {
      await this.answer(reply);
    } catch (error) {
      if (this.running.signal.aborted) reply.foot.append(pill("stopped", "mild"));
      else reply.fail(error.message);
    } finally {
      this.running = null;
      this.stop.hidden = true;
      this.send.disabled = false;
    }
    if (reply.failed && !reply.said.data) messages.pop(); // the question is on the page, marked, and not sent again
    else messages.push({ role: "assistant", content: reply.said.data });
  }

  async answer(reply) {
    const began = performance.now();
    const signal = this.running.signal;
    const url = `accounts/${encodeURIComponent(this.session.account)}/ai/v1/chat/completions`;
    const response = await answered(url, { method: "POST", body: JSON.stringify(this.body()), headers: this.headers(), signal }, signal);
    let first = null;
    let usage = null;
    let ended = false;
    for await (const data of events(response.body, signal)) {
      if ((ended ||= data === "[DONE]")) continue; // to the very end: who leaves before it is logged as having left
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      const piece = chunk.choices?.[0]?.delta?.content;
      usage = chunk.usage ?? usage;
      if (!piece) continue;
      first ??= performance.now() - began;
      reply.said.appendData(piece);
    }
    if (!ended) throw new Error("The answer was cut off.");
    this.tell(reply, response.headers, first, performance.now() - began, usage);
  }

  body() {
    const system = this.system.control.value.trim();
    const body = { model: this.model.control.value.trim(), stream: true, stream_options: { include_usage: true } };
    body.messages = [...(system ? [{ role: "system", content: system }] : []), ...this.messages.filter(({ content }) => content)];
    if (this.most.control.value) body.max_tokens = Number(this.most.control.value);
    if (this.temperature.control.value) body.temperature = Number(this.temperature.control.value);
    return body;
  }

  headers() {
    const headers = { ...this.session.api.headers, "content-type": "application/json", "cf-aig-gateway-id": this.gateway.control.value };
    return this.fresh.control.checked ? { ...headers, "cf-aig-skip-cache": "true" } : headers;
  }

  /** What the reply's headers say of it, and its cost as soon as the log has it. */
  async tell(reply, headers, first, whole, usage) {
    const id = headers.get("cf-aig-log-id");
    const cost = element("span");
    const step = Number(headers.get("cf-aig-step"));
    reply.foot.append(
      element("span", {}, `${headers.get("cf-aig-provider")}/${headers.get("cf-aig-model")}`),
      ...(headers.get("cf-aig-cache-status") === "HIT" ? [pill("cached", "good")] : []),
      ...(step ? [pill(`step ${step}`, "mild")] : []),
      element("span", {}, `first content ${millis(first)}, whole ${millis(whole)}`),
      element("span", {}, usage ? `${count(usage.prompt_tokens)} → ${count(usage.completion_tokens)} tokens` : ""),
      cost,
      ...(id ? [link(`#/logs/${id}`, "log")] : []),
    );
    const record = id ? await this.record(id) : null;
    if (record) cost.textContent = money(record.micros);
  }

  async record(id) {
    for (let i = 0; i < LOG_TRIES && !this.where.signal.aborted; i += 1) {
      await new Promise((wake) => setTimeout(wake, LOG_PAUSE));
      const found = await this.session.api.get("logs", { id, limit: 1 }, this.where.signal).catch(() => ({ items: [] }));
      if (found.items.length) return found.items[0];
    }
    return null;
  }
}

function turn(role, content) {
  const said = document.createTextNode(content);
  const foot = element("div", { className: "foot" });
  const node = element("li", { className: `said ${role}` }, element("b", {}, role), element("p", {}, said), foot);
  const fail = (message) => {
    made.failed = true;
    node.classList.add("error");
    foot.append(element("span", { className: "failed", role: "alert" }, message));
  };
  const made = { node, said, foot, fail, failed: false };
  return made;
}
