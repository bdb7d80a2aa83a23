/** Connect: the address, a key and a model, and the program text with which each client uses them. */

import { copyButton, element } from "../dom.js";
import { highlight } from "../highlight.js";
import { clients } from "../snippets.js";
import { fetchOk } from "./api.js";
import { button, field, head, link } from "./components.js";
import { loadModelNames } from "./model-names.js";

const DEFAULT = "default";
const PLACEHOLDER_KEY = "YOUR_KEY";

export async function connect(session, context) {
  return new Connect(session, context).open();
}

class Connect {
  constructor(session, context) {
    Object.assign(this, { session, context, engineURL: "", client: "curl" });
    const gateways = context.gateways.map((name) => [name, name]);
    this.gateway = field({
      name: "gateway",
      label: "Gateway",
      kind: "select",
      options: gateways,
      value: session.gateway || DEFAULT,
    });
    this.key = field({
      name: "key",
      label: "Key",
      placeholder: "paste a key that you have, or create one",
      id: "connect-key",
    });
    this.model = field({ name: "model", label: "Model", id: "connect-model", required: true });
    this.names = element("datalist", { id: "connect-models" });
    this.model.control.setAttribute("list", this.names.id);
    this.url = element("code", { id: "base-url" });
    this.tabs = element("nav", { className: "tabs", ariaLabel: "Client" });
    this.snippet = element("div", { id: "snippet" });
    this.keyNotice = element("p", { className: "about", id: "connect-key-notice", role: "status" });
    this.answer = element("p", { className: "about", id: "connect-answer", role: "status" });
    for (const input of [this.gateway, this.key, this.model]) input.addEventListener("input", () => this.draw());
    this.gateway.addEventListener("input", () => this.loadModels());
  }

  async open() {
    const [providers] = await Promise.all([this.session.api.all("providers", this.context.signal), this.loadModels()]);
    this.engineURL = providers.find(({ slug }) => slug === "emberline").base_url;
    const create = button("Create a key", () => this.createKey(), "primary");
    create.id = "create-connect-key";
    const test = button("Send a test request", () => this.test());
    test.id = "connect-test";
    const keyFields = element(
      "div",
      { className: "fields" },
      this.gateway,
      this.model,
      this.names,
      this.key,
      element("div", { className: "check" }, create),
    );
    this.draw();
    return element(
      "div",
      { id: "connect" },
      head(
        "Connect",
        "Use the gateway from your own program. Every client needs the same three things: an address, a key and a model.",
        this.engineLink(),
        link("static/reference.html", "API reference"),
      ),
      element(
        "section",
        { className: "card" },
        element("h3", {}, "1. Address"),
        element(
          "div",
          { className: "address" },
          this.url,
          copyButton(() => this.url.textContent, "Copy the address"),
        ),
      ),
      element("section", { className: "card" }, element("h3", {}, "2. Key and model"), keyFields, this.keyNotice),
      element(
        "section",
        { className: "card" },
        element("h3", {}, "3. Client"),
        this.tabs,
        this.snippet,
        element("div", { className: "buttons" }, test),
        this.answer,
      ),
    );
  }

  /** A link to the engine's own playground. Its address is as the gateway reaches it, which may differ for this browser. */
  engineLink() {
    const node = link(this.engineURL, "Engine");
    Object.assign(node, { id: "engine-link", rel: "noreferrer", title: `the engine's own page, ${this.engineURL}` });
    return node;
  }

  /** The address and headers that select the account and the gateway. */
  get endpoint() {
    const { account } = this.session;
    const root = new URL(".", location.href.split("#")[0]).href.replace(/\/$/, "");
    const prefix = account === DEFAULT ? root : `${root}/accounts/${encodeURIComponent(account)}/ai`;
    const gateway = this.gateway.control.value;
    return {
      base: `${prefix}/v1`,
      anthropic: prefix,
      engine: this.engineURL,
      key: this.key.control.value.trim() || PLACEHOLDER_KEY,
      headers: gateway === DEFAULT ? {} : { "cf-aig-gateway-id": gateway },
    };
  }

  async loadModels() {
    const names = await loadModelNames(this.session, this.gateway.control.value, this.context.signal);
    this.names.replaceChildren(...names.map((value) => element("option", { value })));
    this.model.control.value ||= names[0] ?? "";
    this.draw();
  }

  draw() {
    const all = clients(this.endpoint, this.model.control.value.trim() || "MODEL");
    this.url.textContent = this.endpoint.base;
    const tab = ({ id, title }) => {
      const node = element("a", { href: `#/connect`, data: { client: id }, role: "button" }, title);
      node.ariaCurrent = id === this.client ? "true" : null;
      node.addEventListener("click", (event) => (event.preventDefault(), (this.client = id), this.draw()));
      return node;
    };
    this.tabs.replaceChildren(...all.map(tab));
    const { code, language, note } = all.find(({ id }) => id === this.client);
    const bar = element(
      "div",
      { className: "code-bar" },
      element("span", {}, note || language),
      copyButton(() => code, "Copy the code"),
    );
    this.snippet.replaceChildren(
      element(
        "div",
        { className: "code" },
        bar,
        element("pre", { tabIndex: 0 }, element("code", {}, ...highlight(code, language))),
      ),
    );
  }

  async createKey() {
    const gateway = this.gateway.control.value;
    const name = `connect ${new Date().toISOString().slice(0, 16).replace("T", " ")}`;
    const { secret } = await this.session.api.send("POST", "keys", { name, kind: "virtual", gateways: [gateway] });
    this.key.control.value = secret;
    this.keyNotice.replaceChildren(
      element("strong", {}, "Copy it now. "),
      `It is shown only here and only now. It may use the models of the gateway ${gateway}; change or revoke it on the page `,
      link("#/keys", "Keys"),
      ".",
    );
    this.draw();
  }

  /** Send the request of the snippet from this page. */
  async test() {
    const { base, key, headers } = this.endpoint;
    this.answer.textContent = "Waiting for the answer …";
    const body = {
      model: this.model.control.value.trim(),
      messages: [{ role: "user", content: "Name the capital of France." }],
      temperature: 0,
      max_tokens: 64,
    };
    const authorization = key === PLACEHOLDER_KEY ? {} : { authorization: `Bearer ${key}` };
    try {
      const request = {
        method: "POST",
        body: JSON.stringify(body),
        headers: { "content-type": "application/json", ...authorization, ...headers },
        signal: this.context.signal,
      };
      const reply = await (await fetchOk(`${base}/chat/completions`, request, this.context.signal)).json();
      this.answer.replaceChildren(
        element("strong", { className: "answered" }, "✓ Answered: "),
        reply.choices?.[0]?.message?.content ?? "(no text)",
      );
    } catch (error) {
      this.answer.replaceChildren(
        element("strong", { className: "failed" }, `✕ Failed${error.status ? ` (${error.status})` : ""}: `),
        error.message,
      );
    }
  }
}
