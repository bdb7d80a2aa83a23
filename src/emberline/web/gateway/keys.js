/** Keys of the gateway: create (the secret is shown once), restrict, disable and revoke them. */

import { copyButton, element } from "../dom.js";
import { NONE, formatDate } from "./format.js";
import { withErrorToast, openDialog, button, openConfirmDialog, closeDialog, field, form, head, link, list, pill, showToast, table } from "./components.js";
import { segment } from "./api.js";

const patternText = (patterns) => (patterns.length === 1 && patterns[0] === "*" ? "any" : patterns.join(", ") || "none");

export async function keys(session, context) {
  return new Keys(session.api, context).open();
}

class Keys {
  constructor(api, context) {
    Object.assign(this, { api, context });
    this.list = element("section", { className: "card", id: "keys-found" });
    this.warning = element("p", { className: "alarm", id: "keys-warning", role: "status", hidden: true });
  }

  async open() {
    await this.show();
    const make = button("New key", () => this.create(), "primary");
    make.id = "new-key";
    return element("div", {}, head("Keys", "Keys that may use or manage the gateway, and their limits. A secret is shown only once, when its key is created.", make), this.warning, this.list);
  }

  async show() {
    const [items, gateways] = await Promise.all([this.api.all("keys", this.context.signal), this.api.all("gateways", this.context.signal)]);
    const openGateways = gateways.filter(({ value }) => !value.authentication).map(({ id }) => id);
    this.warning.hidden = !openGateways.length;
    const settings = openGateways.flatMap((id, i) => [i ? ", " : "", link(`#/gateways/${segment(id)}`, id)]);
    this.warning.replaceChildren(element("strong", {}, "Authentication is off"), " for ", ...settings, ": requests without a key are answered. To require a key, change the settings of the gateway.");
    const columns = [
      ["Name", (k) => element("span", { className: "entry" }, element("b", {}, k.name), element("small", {}, `${k.shown}…`)), "wide"],
      ["Scopes", (k) => element("span", { className: "badges" }, ...k.scopes.map((scope) => pill(scope, scope === "admin" ? "mild" : "good")))],
      ["User", (k) => k.user || NONE],
      ["Models", (k) => patternText(k.allowed_models)],
      ["Limits", (k) => k.limits.join(", ") || NONE],
      ["Created", (k) => formatDate(k.created)],
      ["Expires", (k) => (k.expires === null ? "never" : formatDate(k.expires))],
      ["State", (k) => state(k)],
      ["", (k) => element("span", { className: "actions" }, ...this.actions(k))],
    ];
    this.list.replaceChildren(table("Keys", columns, items, { none: openGateways.length ? "No keys yet." : "No keys yet. Until you create one, only the keys of the configuration file work." }));
  }

  actions(key) {
    const path = `keys/${segment(key.id)}`;
    const toggle = withErrorToast(async () => {
      await this.api.send("PATCH", path, { disabled: !key.disabled });
      await this.show();
      showToast(key.disabled ? `${key.name} is enabled.` : `${key.name} is disabled.`);
    });
    const revoke = () =>
      openConfirmDialog("Revoke this key?", `Requests with ${key.name} (${key.shown}…) will be rejected. This cannot be undone.`, "Revoke", async () => {
        await this.api.send("DELETE", path);
        await this.show();
      });
    return [button(key.disabled ? "Enable" : "Disable", toggle), button("Change", () => this.change(key)), button("Revoke", revoke, "danger")];
  }

  create() {
    const kind = field({ name: "kind", label: "Kind", kind: "select", options: [["virtual", "virtual key"], ["token", "gateway token"]] });
    const dialogForm = form([...fields(), kind], "Create key", async (values) => {
      const { secret, name } = await this.api.send("POST", "keys", { kind: values.kind, ...keyFrom(values) });
      await this.show();
      showSecret(name, secret);
    });
    dialogForm.id = "key-form";
    openDialog("New key", dialogForm);
  }

  change(key) {
    const dialogForm = form(fields(key), "Save", async (values) => {
      await this.api.send("PATCH", `keys/${segment(key.id)}`, keyFrom(values));
      await this.show();
      closeDialog();
    });
    openDialog(`Change ${key.name}`, dialogForm);
  }
}

function state({ disabled, expires }) {
  if (disabled) return pill("disabled", "bad");
  return expires !== null && expires <= Date.now() ? pill("expired", "bad") : pill("active", "good");
}

function fields(key = null) {
  const text = (name, label, value, more = {}) => field({ name, label, value, ...more });
  return [
    text("name", "Name", key?.name ?? "", { required: true, maxLength: 128 }),
    text("user", "User", key?.user ?? "", { hint: "costs and limits are counted for this user" }),
    text("allowed_models", "Models", key?.allowed_models.join(", ") ?? "*", { hint: "for example gpt-5*, llama*" }),
    text("allowed_providers", "Providers", key?.allowed_providers.join(", ") ?? "*"),
    text("gateways", "Gateways", key?.gateways.join(", ") ?? "*"),
    text("limits", "Limits", key?.limits.join(", ") ?? "", { hint: "names of limits that apply only to keys that list them" }),
    text("expires", "Expires", key?.expires ? localTime(key.expires) : "", { kind: "datetime-local" }),
    field({ name: "use", label: "May use models", kind: "check", value: key ? key.scopes.includes("use") : true }),
    field({ name: "admin", label: "May manage this account", kind: "check", value: key?.scopes.includes("admin") ?? false }),
    field({ name: "cost", label: "May state the cost of its requests", kind: "check", value: key?.scopes.includes("cost") ?? false }),
  ];
}

const keyFrom = (values) => ({
  name: values.name,
  user: values.user,
  allowed_models: list(values.allowed_models),
  allowed_providers: list(values.allowed_providers),
  gateways: list(values.gateways),
  limits: list(values.limits),
  expires: values.expires ? new Date(values.expires).getTime() : null,
  scopes: ["use", "admin", "cost"].filter((scope) => values[scope]),
});

/** Format for a datetime-local field: local time without a zone. */
const localTime = (ms) => new Date(ms - 60_000 * new Date(ms).getTimezoneOffset()).toISOString().slice(0, 16);

function showSecret(name, secret) {
  const shown = element("div", { className: "secret" }, element("code", { id: "secret" }, secret), copyButton(() => secret, "Copy the secret"));
  const notice = element("p", {}, "Copy it now. Only its hash is stored, so it cannot be shown again.");
  openDialog(`Secret of ${name}`, notice, shown, element("div", { className: "buttons" }, button("I have copied it", closeDialog, "primary")));
}
