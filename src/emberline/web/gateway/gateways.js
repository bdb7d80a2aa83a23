/** Gateways and their settings. Gateways of the configuration file are read-only here. */

import { element } from "../dom.js";
import { segment } from "./api.js";
import { openDialog, button, openConfirmDialog, closeDialog, field, form, head, pill, table } from "./components.js";

/** Fields that the URL or other pages set. */
const HIDDEN_FIELDS = ["account", "gateway", "version", "routes"];
const isConfigured = ({ version }) => version === 0;

export async function gateways(session, context) {
  return new Gateways(session.api, context).open();
}

class Gateways {
  constructor(api, context) {
    Object.assign(this, { api, context });
    this.list = element("section", { className: "card", id: "gateways-found" });
  }

  async open() {
    await this.show();
    const make = button("New gateway", () => this.edit(null), "primary");
    make.id = "new-gateway";
    return element("div", {}, head("Gateways", "Each gateway has its own providers, limits, cache and logs. A key can be restricted to some gateways.", make), this.list);
  }

  async show() {
    const items = await this.api.all("gateways", this.context.signal);
    const columns = [
      ["Name", ({ id }) => element("b", {}, id), "wide"],
      ["Key", ({ value }) => (value.authentication ? pill("required", "good") : pill("not required", "mild"))],
      ["Providers", ({ value }) => Object.keys(value.providers).join(", ") || "\u2013"],
      ["Cache", ({ value }) => (value.cache_ttl ? `${value.cache_ttl} s` : "off")],
      ["Logs", ({ value }) => (value.logs.collect ? `${value.logs.days} days${value.zdr || !value.logs.payloads ? ", no payloads" : ""}` : "off")],
      ["Defined in", (item) => (isConfigured(item) ? "configuration file" : "dashboard")],
      ["", (item) => element("span", { className: "actions" }, ...this.actions(item))],
    ];
    this.list.replaceChildren(table("Gateways", columns, items));
  }

  actions(item) {
    if (isConfigured(item)) return [button("View", () => this.view(item))];
    const remove = () =>
      openConfirmDialog(`Delete ${item.id}?`, "Requests to it will be rejected. Its logs are kept until they expire.", "Delete", async () => {
        await this.api.send("DELETE", `gateways/${segment(item.id)}?version=${item.version}`);
        await this.changed();
      });
    return [button("Change", () => this.edit(item)), button("Delete", remove, "danger")];
  }

  view({ id, value }) {
    openDialog(id, element("p", {}, "This gateway is defined in the configuration file and can only be changed there."), element("pre", { tabIndex: 0 }, settingsText(value)));
  }

  edit(old) {
    const defaults = { authentication: true, providers: {}, cache_ttl: 0 };
    const fields = [
      field({ name: "name", label: "Name", value: old?.id ?? "", required: true, maxLength: 64, pattern: "[A-Za-z0-9_.\\-]+", readOnly: Boolean(old), wide: true }),
      field({ name: "settings", label: "Settings", kind: "area", rows: 18, wide: true, value: settingsText(old?.value ?? defaults), hint: "JSON with the fields of the configuration file; omitted fields have their default" }),
    ];
    const dialogForm = form(fields, "Save", async ({ name, settings }) => {
      const path = `gateways/${segment(name)}`;
      const body = JSON.parse(settings);
      await (old ? this.api.send("PUT", `${path}?version=${old.version}`, body) : this.api.send("POST", path, body));
      await this.changed();
      closeDialog();
    });
    dialogForm.id = "gateway-form";
    openDialog(old ? `Change ${old.id}` : "New gateway", dialogForm);
  }

  async changed() {
    await this.show();
    await this.context.changed();
  }
}

function settingsText(value) {
  const rest = Object.fromEntries(Object.entries(value).filter(([name]) => !HIDDEN_FIELDS.includes(name)));
  return JSON.stringify(rest, null, 2);
}
