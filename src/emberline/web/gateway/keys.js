/** Keys of the gateway: made (the secret is shown once), limited, disabled, revoked. */

import { copyButton, element } from "../dom.js";
import { NONE, day } from "./figures.js";
import { acting, ask, button, confirmed, done, field, form, head, list, pill, say, table } from "./parts.js";
import { part } from "./api.js";

const any = (patterns) => (patterns.length === 1 && patterns[0] === "*" ? "any" : patterns.join(", ") || "none");

export async function keys(session, where) {
  return new Keys(session.api, where).open();
}

class Keys {
  constructor(api, where) {
    Object.assign(this, { api, where });
    this.found = element("section", { className: "card", id: "keys-found" });
    this.warning = element("p", { className: "alarm", id: "keys-warning", role: "status", hidden: true });
  }

  async open() {
    await this.show();
    const make = button("New key", () => this.make(), "primary");
    make.id = "new-key";
    return element("div", {}, head("Keys", "Who may use the gateway, and how much. A secret is shown once, when its key is made.", make), this.warning, this.found);
  }

  async show() {
    const [items, gateways] = await Promise.all([this.api.all("keys", this.where.signal), this.api.all("gateways", this.where.signal)]);
    const open = gateways.filter(({ value }) => !value.authentication).map(({ id }) => id);
    this.warning.hidden = !open.length;
    this.warning.replaceChildren(element("strong", {}, "Authentication is off"), ` for ${open.join(", ")}: requests without a key are answered there. Set authentication to true in its settings (Gateways, or the configuration file) to require a key.`);
    const columns = [
      ["Name", (k) => element("span", { className: "place" }, element("b", {}, k.name), element("small", {}, `${k.shown}…`)), "wide"],
      ["May", (k) => element("span", { className: "marks" }, ...k.scopes.map((scope) => pill(scope, scope === "admin" ? "mild" : "good")))],
      ["User", (k) => k.user || NONE],
      ["Models", (k) => any(k.allowed_models)],
      ["Limits", (k) => k.limits.join(", ") || NONE],
      ["Made", (k) => day(k.created)],
      ["Expires", (k) => (k.expires === null ? "never" : day(k.expires))],
      ["State", (k) => state(k)],
      ["", (k) => element("span", { className: "actions" }, ...this.actions(k))],
    ];
    this.found.replaceChildren(table("Keys", columns, items, { none: open.length ? "No keys yet." : "No keys yet. Until there is one, only keys of the configuration work." }));
  }

  actions(key) {
    const path = `keys/${part(key.id)}`;
    const turn = acting(async () => {
      await this.api.send("PATCH", path, { disabled: !key.disabled });
      await this.show();
      say(key.disabled ? `${key.name} works again.` : `${key.name} is disabled.`);
    });
    const revoke = () =>
      confirmed("Revoke this key?", `Requests with ${key.name} (${key.shown}…) will be refused for good.`, "Revoke", async () => {
        await this.api.send("DELETE", path);
        await this.show();
      });
    return [button(key.disabled ? "Enable" : "Disable", turn), button("Change", () => this.change(key)), button("Revoke", revoke, "danger")];
  }

  make() {
    const kind = field({ name: "kind", label: "Kind", kind: "select", options: [["virtual", "virtual key"], ["token", "gateway token"]] });
    const wanted = form([...fields(), kind], "Make the key", async (given) => {
      const { secret, name } = await this.api.send("POST", "keys", { kind: given.kind, ...wish(given) });
      await this.show();
      reveal(name, secret);
    });
    wanted.id = "key-form";
    ask("New key", wanted);
  }

  change(key) {
    const wanted = form(fields(key), "Save", async (given) => {
      await this.api.send("PATCH", `keys/${part(key.id)}`, wish(given));
      await this.show();
      done();
    });
    ask(`Change ${key.name}`, wanted);
  }
}

function state({ disabled, expires }) {
  if (disabled) return pill("disabled", "bad");
  return expires !== null && expires <= Date.now() ? pill("expired", "bad") : pill("works", "good");
}

function fields(key = null) {
  const text = (name, label, value, more = {}) => field({ name, label, value, ...more });
  return [
    text("name", "Name", key?.name ?? "", { required: true, maxLength: 128 }),
    text("user", "User", key?.user ?? "", { hint: "costs and limits are counted for them" }),
    text("allowed_models", "Models", key?.allowed_models.join(", ") ?? "*", { hint: "such as gpt-5*, llama*" }),
    text("allowed_providers", "Providers", key?.allowed_providers.join(", ") ?? "*"),
    text("gateways", "Gateways", key?.gateways.join(", ") ?? "*"),
    text("limits", "Limits", key?.limits.join(", ") ?? "", { hint: "names of rules for keys that name them" }),
    text("expires", "Expires", key?.expires ? local(key.expires) : "", { kind: "datetime-local" }),
    field({ name: "use", label: "May use models", kind: "check", value: key ? key.scopes.includes("use") : true }),
    field({ name: "admin", label: "May manage this account", kind: "check", value: key?.scopes.includes("admin") ?? false }),
  ];
}

const wish = (given) => ({
  name: given.name,
  user: given.user,
  allowed_models: list(given.allowed_models),
  allowed_providers: list(given.allowed_providers),
  gateways: list(given.gateways),
  limits: list(given.limits),
  expires: given.expires ? new Date(given.expires).getTime() : null,
  scopes: ["use", "admin"].filter((scope) => given[scope]),
});

/** As the field has it: local time, without a zone. */
const local = (ms) => new Date(ms - 60_000 * new Date(ms).getTimezoneOffset()).toISOString().slice(0, 16);

function reveal(name, secret) {
  const shown = element("div", { className: "secret" }, element("code", { id: "secret" }, secret), copyButton(() => secret, "Copy the secret"));
  const told = element("p", {}, "Copy it now: only its hash is kept, and nobody can show it again.");
  ask(`The secret of ${name}`, told, shown, element("div", { className: "buttons" }, button("I have it", done, "primary")));
}
