/** Providers: their keys, which go in and never come out, and providers of the account's own. */

import { element } from "../dom.js";
import { NONE, exactly } from "./figures.js";
import { ask, button, confirmed, done, field, form, head, list, pill, say, table } from "./parts.js";
import { part } from "./api.js";

const DIALECTS = "openai-chat, openai-responses, openai-embeddings, anthropic, gemini";

export async function providers(session, where) {
  return new Providers(session.api, where).open();
}

class Providers {
  constructor(api, where) {
    Object.assign(this, { api, where });
    this.keys = element("div", { id: "provider-keys" });
    this.own = element("div", { id: "custom-providers" });
    this.known = element("div", { id: "known-providers" });
  }

  async open() {
    await this.show();
    const store = button("Store a key", () => this.store(), "primary");
    store.id = "store-key";
    const add = button("Add a provider", () => this.edit(null));
    add.id = "add-provider";
    return element(
      "div",
      {},
      head("Providers", "Keys are encrypted when they arrive; no answer of the gateway contains one.", add, store),
      element("section", { className: "card" }, element("h3", {}, "Keys of providers"), this.keys),
      element("section", { className: "card" }, element("h3", {}, "Providers of your own"), this.own),
      element("section", { className: "card" }, element("h3", {}, "Known providers", element("small", {}, "a key is enough to use one")), this.known),
    );
  }

  async show() {
    const [keys, own, known] = await Promise.all(["provider-keys", "custom-providers", "providers"].map((path) => this.api.all(path, this.where.signal)));
    const columns = [
      ["Provider", ({ provider }) => element("b", {}, provider), "wide"],
      ["Alias", ({ alias }) => alias],
      ["Stored", ({ created }) => exactly(created)],
      ["Key", () => "••••••••"],
      ["", (key) => element("span", { className: "actions" }, button("Replace", () => this.store(key)), this.deleting(`provider-keys/${part(key.provider)}/${part(key.alias)}`, `the key ${key.provider}/${key.alias}`))],
    ];
    this.keys.replaceChildren(table("Keys of providers", columns, keys, { none: "No keys are stored. Requests may bring their own." }));
    const places = [
      ["Name", ({ value }) => element("span", { className: "place" }, element("b", {}, value.name), element("small", {}, `custom-${value.slug}`)), "wide"],
      ["Address", ({ value }) => value.base_url],
      ["Speaks", ({ value }) => value.speaks?.join(", ") ?? "as OpenAI does"],
      ["State", ({ value }) => (value.enable ? pill("on", "good") : pill("off", "bad"))],
      ["", (item) => element("span", { className: "actions" }, button("Change", () => this.edit(item)), this.deleting(`custom-providers/${part(item.id)}`, item.value.name))],
    ];
    const facts = [
      ["Provider", ({ slug }) => element("b", {}, slug), "wide"],
      ["Address", ({ base_url }) => base_url || NONE],
      ["Speaks", ({ speaks }) => speaks.join(", ") || NONE],
      ["Key", ({ needs_key, has_key }) => (has_key ? pill("stored", "good") : needs_key ? pill("none", "mild") : "not needed")],
      ["", ({ slug, has_key }) => (has_key ? null : button("Store a key", () => this.store({ provider: slug, alias: "default" })))],
    ];
    this.known.replaceChildren(table("Known providers", facts, known));
    this.own.replaceChildren(table("Providers of your own", places, own, { none: "None. Anything that speaks a known dialect can be one." }));
  }

  deleting(path, what) {
    const sure = () =>
      confirmed(`Delete ${what}?`, "Requests that need it will fail.", "Delete", async () => {
        await this.api.send("DELETE", path);
        await this.show();
      });
    return button("Delete", sure, "danger");
  }

  store(old = null) {
    const fields = [
      field({ name: "provider", label: "Provider", value: old?.provider ?? "", placeholder: "openai", required: true, readOnly: Boolean(old) }),
      field({ name: "alias", label: "Alias", value: old?.alias ?? "default", required: true, readOnly: Boolean(old), hint: "cf-aig-byok-alias chooses" }),
      field({ name: "secret", label: "Key", kind: "password", required: true, wide: true, autocomplete: "new-password" }),
    ];
    const wanted = form(fields, "Store", async ({ provider, alias, secret }) => {
      await this.api.send("PUT", `provider-keys/${part(provider)}/${part(alias)}`, { secret });
      await this.show();
      done();
      say("Stored, encrypted.");
    });
    wanted.id = "provider-key-form";
    ask(old?.created ? `Replace ${old.provider}/${old.alias}` : "Store a provider's key", wanted);
  }

  edit(old) {
    const value = old?.value;
    const fields = [
      field({ name: "name", label: "Name", value: value?.name ?? "", required: true }),
      field({ name: "slug", label: "Slug", value: value?.slug ?? "", required: true, pattern: "[a-z0-9\\-]+", readOnly: Boolean(old), hint: "its address here is custom-SLUG" }),
      field({ name: "base_url", label: "Address", kind: "url", value: value?.base_url ?? "", required: true, wide: true, placeholder: "https://models.example.com/v1" }),
      field({ name: "speaks", label: "Speaks", value: value?.speaks?.join(", ") ?? "", wide: true, hint: `${DIALECTS}; empty: as OpenAI does` }),
      field({ name: "enable", label: "On", kind: "check", value: value?.enable ?? true }),
    ];
    const wanted = form(fields, "Save", async (given) => {
      const body = { ...value, ...given, speaks: given.speaks ? list(given.speaks) : null };
      await this.api.send("PUT", `custom-providers/${part(given.slug)}${old ? `?version=${old.version}` : ""}`, body);
      await this.show();
      done();
    });
    wanted.id = "provider-form";
    ask(old ? `Change ${value.name}` : "Add a provider", wanted);
  }
}
