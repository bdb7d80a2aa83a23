/** The playground: a conversation with any model through the gateway, with provider, latency and cost of each answer. */

import { element } from "../dom.js";
import { events } from "../wire.js";
import { fetchOk } from "./api.js";
import { count, millis, money } from "./format.js";
import { button, field, head, link, pill } from "./components.js";

const LOG_ATTEMPTS = 10; // the record is written shortly after the answer
const LOG_RETRY_MS = 300;

export async function playground(session, context) {
  return new Playground(session, context).open();
}

class Playground {
  constructor(session, context) {
    Object.assign(this, { session, context, messages: [], running: null });
    this.list = element("ol", { className: "messages", id: "messages", role: "log", ariaLabel: "Conversation" });
    this.names = element("datalist", { id: "models" });
    this.prompt = element("textarea", { id: "prompt", rows: 3, placeholder: "Message the model", ariaLabel: "Message" });
    this.send = element("button", { type: "submit", className: "primary", id: "send" }, "Send");
    this.stop = button("Stop", () => this.running?.abort());
    this.stop.id = "stop";
    this.stop.hidden = true;
    const gateways = context.gateways.map((name) => [name, name]);
    this.model = field({ name: "model", label: "Model", required: true, placeholder: "provider/model", id: "model" });
    this.model.control.setAttribute("list", "models");
    this.gateway = field({ name: "gateway", label: "Gateway", kind: "select", options: gateways, value: session.gateway || "default" });
    this.system = field({ name: "system", label: "System prompt", kind: "area", rows: 3 });
    this.maxTokens = field({ name: "max_tokens", label: "Max tokens", kind: "number", min: 1, value: 512 });
    this.temperature = field({ name: "temperature", label: "Temperature", kind: "number", min: 0, max: 2, step: 0.1, placeholder: "model default" });
    this.skipCache = field({ name: "skip_cache", label: "Skip the cache", kind: "check" });
  }

  async open() {
    this.suggestModels();
    this.gateway.control.addEventListener("change", () => this.suggestModels());
    const clear = button("New conversation", () => {
      this.running?.abort();
      this.messages = [];
      this.list.replaceChildren();
      this.prompt.focus();
    });
    const form = element("form", { className: "message-form" }, this.prompt, element("div", { className: "buttons" }, this.stop, this.send));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.sendMessage();
    });
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) event.preventDefault(), form.requestSubmit();
      if (event.key === "Escape") this.running?.abort();
    });
    this.context.signal.addEventListener("abort", () => this.running?.abort());
    const options = element("section", { className: "card fields", id: "options" }, this.model, this.names, this.gateway, this.maxTokens, this.temperature, this.skipCache, element("div", { className: "wide" }, this.system));
    return element("div", {}, head("Playground", "Requests go through the gateway with your key: limits, cache, routes and logs apply as for every client.", clear), options, element("section", { className: "card" }, this.list, form));
  }

  /** Offer model names; others can be typed. */
  async suggestModels() {
    const gateway = this.gateway.control.value;
    const headers = { ...this.session.api.headers, "cf-aig-gateway-id": gateway };
    if (this.session.account !== "default") return; // v1/models lists the default account only
    const modelList = fetchOk("v1/models", { headers, signal: this.context.signal }, this.context.signal).then((reply) => reply.json());
    const [models, routes] = await Promise.all([modelList.catch(() => ({ data: [] })), this.session.api.all("routes", this.context.signal).catch(() => [])]);
    const names = [...models.data.filter(({ kind = "chat" }) => kind === "chat").map(({ id }) => id), ...routes.filter(({ deployed }) => deployed !== null).map(({ name }) => `dynamic/${name}`)];
    this.names.replaceChildren(...names.map((name) => element("option", { value: name })));
    if (document.activeElement !== this.model.control) this.model.control.value ||= names[0] ?? ""; // not while the user types
  }

  async sendMessage() {
    const text = this.prompt.value.trim();
    if (!text || this.running || !this.model.control.reportValidity()) return;
    this.prompt.value = "";
    const messages = this.messages; // "New conversation" replaces the list
    messages.push({ role: "user", content: text });
    this.list.append(createMessage("user", text).node);
    const reply = createMessage("assistant", "");
    this.list.append(reply.node);
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
    if (reply.failed && !reply.text.data) messages.pop(); // the failed question stays on the page and is not sent again
    else messages.push({ role: "assistant", content: reply.text.data });
  }

  async answer(reply) {
    const started = performance.now();
    const signal = this.running.signal;
    const url = `accounts/${encodeURIComponent(this.session.account)}/ai/v1/chat/completions`;
    const response = await fetchOk(url, { method: "POST", body: JSON.stringify(this.body()), headers: this.headers(), signal }, signal);
    let first = null;
    let usage = null;
    let ended = false;
    for await (const data of events(response.body, signal)) {
      if ((ended ||= data === "[DONE]")) continue; // read to the end: leaving earlier would be logged as a disconnect
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      const piece = chunk.choices?.[0]?.delta?.content;
      usage = chunk.usage ?? usage;
      if (!piece) continue;
      first ??= performance.now() - started;
      reply.text.appendData(piece);
    }
    if (!ended) throw new Error("The answer is incomplete: the connection was closed.");
    this.showDetails(reply, response.headers, first, performance.now() - started, usage);
  }

  body() {
    const system = this.system.control.value.trim();
    const body = { model: this.model.control.value.trim(), stream: true, stream_options: { include_usage: true } };
    body.messages = [...(system ? [{ role: "system", content: system }] : []), ...this.messages.filter(({ content }) => content)];
    if (this.maxTokens.control.value) body.max_tokens = Number(this.maxTokens.control.value);
    if (this.temperature.control.value) body.temperature = Number(this.temperature.control.value);
    return body;
  }

  headers() {
    const headers = { ...this.session.api.headers, "content-type": "application/json", "cf-aig-gateway-id": this.gateway.control.value };
    return this.skipCache.control.checked ? { ...headers, "cf-aig-skip-cache": "true" } : headers;
  }

  /** Show what the reply's headers contain, and its cost as soon as it is logged. */
  async showDetails(reply, headers, first, total, usage) {
    const id = headers.get("cf-aig-log-id");
    const cost = element("span");
    const step = Number(headers.get("cf-aig-step"));
    reply.foot.append(
      element("span", {}, `${headers.get("cf-aig-provider")}/${headers.get("cf-aig-model")}`),
      ...(headers.get("cf-aig-cache-status") === "HIT" ? [pill("cached", "good")] : []),
      ...(step ? [pill(`step ${step}`, "mild")] : []),
      element("span", {}, `first content ${millis(first)}, total ${millis(total)}`),
      element("span", {}, usage ? `${count(usage.prompt_tokens)} → ${count(usage.completion_tokens)} tokens` : ""),
      cost,
      ...(id ? [link(`#/logs/${id}`, "log")] : []),
    );
    const record = id ? await this.record(id) : null;
    if (record) cost.textContent = money(record.micros);
  }

  async record(id) {
    for (let i = 0; i < LOG_ATTEMPTS && !this.context.signal.aborted; i += 1) {
      await new Promise((wake) => setTimeout(wake, LOG_RETRY_MS));
      const found = await this.session.api.get("logs", { id, limit: 1 }, this.context.signal).catch(() => ({ items: [] }));
      if (found.items.length) return found.items[0];
    }
    return null;
  }
}

function createMessage(role, content) {
  const text = document.createTextNode(content);
  const foot = element("div", { className: "foot" });
  const node = element("li", { className: `message ${role}` }, element("b", {}, role), element("p", {}, text), foot);
  const fail = (reason) => {
    message.failed = true;
    node.classList.add("error");
    foot.append(element("span", { className: "failed", role: "alert" }, reason));
  };
  const message = { node, text, foot, fail, failed: false };
  return message;
}
