/** The playground of the dashboard: the same component as the engine's page, with requests through a gateway. */

import { element } from "../dom.js";
import { Playground } from "../playground.js";
import { Endpoint } from "../wire.js";
import { costOf } from "./format.js";
import { link, pill } from "./components.js";
import { loadModels } from "./model-names.js";

const LOG_ATTEMPTS = 10; // the record is written shortly after the answer
const LOG_RETRY_MS = 300;
const PLACEHOLDER_KEY = "YOUR_KEY";
const DEFAULT = "default";

export async function playground(session, context) {
  return new GatewayPlayground(session, context).node;
}

class GatewayPlayground {
  constructor(session, context) {
    Object.assign(this, { session, context });
    this.gateway = element(
      "select",
      { name: "gateway" },
      ...context.gateways.map((name) => new Option(name, name, false, name === (session.gateway || DEFAULT))),
    );
    this.skipCache = element("input", { type: "checkbox", name: "skip_cache" });
    const names = element("datalist", { id: "models" });
    const model = element("input", {
      type: "text",
      id: "model",
      placeholder: "provider/model",
      spellcheck: false,
      autocomplete: "off",
      required: true,
    });
    model.setAttribute("list", names.id);
    const endpoint = new Endpoint({
      prefix: `accounts/${encodeURIComponent(session.account)}/ai/v1`,
      headers: () => this.headers(),
      readDetails,
    });
    endpoint.models = () => loadModels(session, this.gateway.value, context.signal);
    this.playground = new Playground({
      endpoint,
      storageKey: "emberline.gateway.playground",
      modelInput: model,
      fields: [
        names,
        element("label", { className: "wide" }, "Gateway", this.gateway),
        element("label", { className: "wide check" }, this.skipCache, "Skip the cache"),
      ],
      snippetAddress: () => this.snippetAddress(),
      detailNodes,
      onAnswer: (answer) => this.loadCost(answer),
      about: "Requests go through the gateway with your key: limits, cache, routes and logs apply as for every client.",
    });
    this.gateway.addEventListener("change", () => this.playground.listModels());
    context.signal.addEventListener("abort", () => this.playground.close());
    this.playground.listModels();
    this.node = this.playground.node;
  }

  headers() {
    const headers = { ...this.session.api.headers, "cf-aig-gateway-id": this.gateway.value };
    return this.skipCache.checked ? { ...headers, "cf-aig-skip-cache": "true" } : headers;
  }

  snippetAddress() {
    const { account } = this.session;
    const root = location.href.split("#")[0];
    const gateway = this.gateway.value;
    return {
      base: new URL(account === DEFAULT ? "v1" : `accounts/${encodeURIComponent(account)}/ai/v1`, root).href,
      key: PLACEHOLDER_KEY,
      headers: gateway === DEFAULT ? {} : { "cf-aig-gateway-id": gateway },
    };
  }

  /** Add the cost of an answer as soon as it is logged. */
  async loadCost({ details }) {
    for (let i = 0; details?.id && i < LOG_ATTEMPTS && !this.context.signal.aborted; i += 1) {
      await new Promise((wake) => setTimeout(wake, LOG_RETRY_MS));
      const { items } = await this.session.api
        .get("logs", { id: details.id, limit: 1 }, this.context.signal)
        .catch(() => ({ items: [] }));
      if (items.length) return (details.cost = costOf(items[0]));
    }
  }
}

function readDetails(headers) {
  return {
    id: headers.get("cf-aig-log-id"),
    model: `${headers.get("cf-aig-provider")}/${headers.get("cf-aig-model")}`,
    isCached: headers.get("cf-aig-cache-status") === "HIT",
    step: Number(headers.get("cf-aig-step")),
  };
}

function detailNodes({ details }) {
  if (!details) return [];
  return [
    element("span", {}, details.model),
    details.isCached ? pill("◆ cached", "cached") : null,
    details.step ? pill("▲ fallback", "fallback") : null,
    details.cost ? element("span", { className: "cost" }, details.cost) : null,
    details.id ? link(`#/logs/${details.id}`, "log") : null,
  ].filter(Boolean);
}
