/** Gateways: each with its own settings. Those of the configuration file are shown and changed there. */

import { element } from "../dom.js";
import { part } from "./api.js";
import { ask, button, confirmed, done, field, form, head, pill, table } from "./parts.js";

/** What the address or the other rooms say. */
const ELSEWHERE = ["account", "gateway", "version", "routes"];
const isFixed = ({ version }) => version === 0;

export async function gateways(session, where) {
  return new Gateways(session.api, where).open();
}

class Gateways {
  constructor(api, where) {
    Object.assign(this, { api, where });
    this.found = element("section", { className: "card", id: "gateways-found" });
  }

  async open() {
    await this.show();
    const make = button("New gateway", () => this.edit(null), "primary");
    make.id = "new-gateway";
    return element("div", {}, head("Gateways", "Each has its own providers, limits, cache and log; keys may be for some of them only.", make), this.found);
  }

  async show() {
    const items = await this.api.all("gateways", this.where.signal);
    const columns = [
      ["Name", ({ id }) => element("b", {}, id), "wide"],
      ["Key", ({ value }) => (value.authentication ? pill("needed", "good") : pill("not needed", "mild"))],
      ["Providers", ({ value }) => Object.keys(value.providers).join(", ") || "\u2013"],
      ["Cache", ({ value }) => (value.cache_ttl ? `${value.cache_ttl} s` : "off")],
      ["Logs", ({ value }) => (value.logs.collect ? `${value.logs.days} days${value.zdr || !value.logs.payloads ? ", no payloads" : ""}` : "off")],
      ["From", (item) => (isFixed(item) ? "the file" : "here")],
      ["", (item) => element("span", { className: "actions" }, ...this.actions(item))],
    ];
    this.found.replaceChildren(table("Gateways", columns, items));
  }

  actions(item) {
    if (isFixed(item)) return [button("Look", () => this.look(item))];
    const remove = () =>
      confirmed(`Delete ${item.id}?`, "Requests to it will be refused. Its log stays until it is old.", "Delete", async () => {
        await this.api.send("DELETE", `gateways/${part(item.id)}?version=${item.version}`);
        await this.changed();
      });
    return [button("Change", () => this.edit(item)), button("Delete", remove, "danger")];
  }

  look({ id, value }) {
    ask(id, element("p", {}, "It is in the configuration file, and changed there."), element("pre", { tabIndex: 0 }, shown(value)));
  }

  edit(old) {
    const first = { authentication: true, providers: {}, cache_ttl: 0 };
    const fields = [
      field({ name: "name", label: "Name", value: old?.id ?? "", required: true, maxLength: 64, pattern: "[A-Za-z0-9_.\\-]+", readOnly: Boolean(old), wide: true }),
      field({ name: "settings", label: "Settings", kind: "area", rows: 18, wide: true, value: shown(old?.value ?? first), hint: "as in the configuration file, in JSON; what is left out is as usual" }),
    ];
    const wanted = form(fields, "Save", async ({ name, settings }) => {
      const path = `gateways/${part(name)}`;
      const body = JSON.parse(settings);
      await (old ? this.api.send("PUT", `${path}?version=${old.version}`, body) : this.api.send("POST", path, body));
      await this.changed();
      done();
    });
    wanted.id = "gateway-form";
    ask(old ? `Change ${old.id}` : "New gateway", wanted);
  }

  async changed() {
    await this.show();
    await this.where.changed();
  }
}

function shown(value) {
  const rest = Object.fromEntries(Object.entries(value).filter(([name]) => !ELSEWHERE.includes(name)));
  return JSON.stringify(rest, null, 2);
}
