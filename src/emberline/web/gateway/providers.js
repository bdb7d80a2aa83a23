/** Providers: their keys, which can be stored but never read, and custom providers of the account. */

import { element } from "../dom.js";
import { NONE, formatDateTime } from "./format.js";
import { openDialog, button, openConfirmDialog, closeDialog, field, form, head, list, pill, showToast, table } from "./components.js";
import { segment } from "./api.js";

const DIALECTS = "openai-chat, openai-responses, openai-embeddings, anthropic, gemini";

export async function providers(session, context) {
  return new Providers(session.api, context).open();
}

class Providers {
  constructor(api, context) {
    Object.assign(this, { api, context });
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
      head("Providers", "Provider keys are stored encrypted. The gateway never returns them.", add, store),
      element("section", { className: "card" }, element("h3", {}, "Provider keys"), this.keys),
      element("section", { className: "card" }, element("h3", {}, "Custom providers"), this.own),
      element("section", { className: "card" }, element("h3", {}, "Built-in providers", element("small", {}, "need only a key")), this.known),
    );
  }

  async show() {
    const [keys, own, known] = await Promise.all(["provider-keys", "custom-providers", "providers"].map((path) => this.api.all(path, this.context.signal)));
    const columns = [
      ["Provider", ({ provider }) => element("b", {}, provider), "wide"],
      ["Alias", ({ alias }) => alias],
      ["Stored", ({ created }) => formatDateTime(created)],
      ["Key", () => "••••••••"],
      ["", (key) => element("span", { className: "actions" }, button("Replace", () => this.store(key)), this.deleteButton(`provider-keys/${segment(key.provider)}/${segment(key.alias)}`, `the key ${key.provider}/${key.alias}`))],
    ];
    this.keys.replaceChildren(table("Provider keys", columns, keys, { none: "No keys are stored. Requests can bring their own." }));
    const customColumns = [
      ["Name", ({ value }) => element("span", { className: "entry" }, element("b", {}, value.name), element("small", {}, `custom-${value.slug}`)), "wide"],
      ["Base URL", ({ value }) => value.base_url, "wrap"],
      ["APIs", ({ value }) => value.speaks?.join(", ") ?? "OpenAI", "wrap"],
      ["State", ({ value }) => (value.enable ? pill("on", "good") : pill("off", "bad"))],
      ["", (item) => element("span", { className: "actions" }, button("Change", () => this.edit(item)), this.deleteButton(`custom-providers/${segment(item.id)}`, item.value.name))],
    ];
    const builtInColumns = [
      ["Provider", ({ slug }) => element("b", {}, slug)],
      ["Base URL", ({ base_url }) => base_url || NONE, "wrap"],
      ["APIs", ({ speaks }) => speaks.join(", ") || NONE, "wrap"],
      ["Key", ({ needs_key, has_key }) => (has_key ? pill("stored", "good") : needs_key ? pill("none", "mild") : "not required")],
      ["", ({ slug, has_key }) => (has_key ? null : button("Store a key", () => this.store({ provider: slug, alias: "default" })))],
    ];
    this.known.replaceChildren(table("Built-in providers", builtInColumns, known));
    this.own.replaceChildren(table("Custom providers", customColumns, own, { none: "None. Any server with one of the supported APIs can be added." }));
  }

  deleteButton(path, what) {
    const confirmDelete = () =>
      openConfirmDialog(`Delete ${what}?`, "Requests that need it will fail.", "Delete", async () => {
        await this.api.send("DELETE", path);
        await this.show();
      });
    return button("Delete", confirmDelete, "danger");
  }

  store(old = null) {
    const fields = [
      field({ name: "provider", label: "Provider", value: old?.provider ?? "", placeholder: "openai", required: true, readOnly: Boolean(old) }),
      field({ name: "alias", label: "Alias", value: old?.alias ?? "default", required: true, readOnly: Boolean(old), hint: "selected by the header cf-aig-byok-alias" }),
      field({ name: "secret", label: "Key", kind: "password", required: true, wide: true, autocomplete: "new-password" }),
    ];
    const dialogForm = form(fields, "Store", async ({ provider, alias, secret }) => {
      await this.api.send("PUT", `provider-keys/${segment(provider)}/${segment(alias)}`, { secret });
      await this.show();
      closeDialog();
      showToast("The key is stored encrypted.");
    });
    dialogForm.id = "provider-key-form";
    openDialog(old?.created ? `Replace ${old.provider}/${old.alias}` : "Store a provider key", dialogForm);
  }

  edit(old) {
    const value = old?.value;
    const fields = [
      field({ name: "name", label: "Name", value: value?.name ?? "", required: true }),
      field({ name: "slug", label: "Slug", value: value?.slug ?? "", required: true, pattern: "[a-z0-9\\-]+", readOnly: Boolean(old), hint: "requests name it custom-SLUG" }),
      field({ name: "base_url", label: "Base URL", kind: "url", value: value?.base_url ?? "", required: true, wide: true, placeholder: "https://models.example.com/v1" }),
      field({ name: "speaks", label: "APIs", value: value?.speaks?.join(", ") ?? "", wide: true, hint: `${DIALECTS}; empty: OpenAI` }),
      field({ name: "enable", label: "Enabled", kind: "check", value: value?.enable ?? true }),
    ];
    const dialogForm = form(fields, "Save", async (values) => {
      const body = { ...value, ...values, speaks: values.speaks ? list(values.speaks) : null };
      await this.api.send("PUT", `custom-providers/${segment(values.slug)}${old ? `?version=${old.version}` : ""}`, body);
      await this.show();
      closeDialog();
    });
    dialogForm.id = "provider-form";
    openDialog(old ? `Change ${value.name}` : "Add a provider", dialogForm);
  }
}
