/** Prices of the account and of the catalogue, in dollars per million tokens. */

import { element } from "../dom.js";
import { NONE, count, money } from "./format.js";
import { openDialog, button, openConfirmDialog, closeDialog, field, form, head, table } from "./components.js";
import { segment } from "./api.js";

const MILLION = 1_000_000;
const KINDS = [
  ["input", "Input"],
  ["output", "Output"],
  ["cached_read", "Cached input"],
  ["cache_write", "Cache write"],
  ["cache_write_long", "Cache write, long TTL"],
  ["audio", "Audio"],
  ["image", "Images"],
];
const path = (id) => `prices/${id.split("/").map(segment).join("/")}`;

const longInput = (price) => (price?.long ? `from ${count(price.long.above)} tokens` : NONE);
const section = (title, body) => element("section", { className: "card" }, element("h3", {}, title), body);

export async function prices(session, context) {
  return new Prices(session.api, context).open();
}

class Prices {
  constructor(api, context) {
    Object.assign(this, { api, context });
    this.list = element("div", { id: "prices-found" });
    this.catalogue = element("div", { id: "catalogue" });
  }

  async open() {
    await this.show();
    const make = button("Set a price", () => this.edit(null), "primary");
    make.id = "new-price";
    return element("div", {}, head("Prices", "In dollars per million tokens. Your prices override the catalogue. Requests to a model without a price have no cost.", make), section("Your prices", this.list), section("Catalogue", this.catalogue));
  }

  async show() {
    const [items, catalogue] = await Promise.all([this.api.all("prices", this.context.signal), this.api.all("catalogue", this.context.signal)]);
    const columns = [
      ["Model", ({ id }) => element("b", {}, id), "wide"],
      ...KINDS.slice(0, 4).map(([kind, title]) => [title, ({ value }) => money(value[kind]), "number"]),
      ["Long input", ({ value }) => longInput(value)],
      ["", (item) => element("span", { className: "actions" }, button("Change", () => this.edit(item)), button("Delete", () => this.remove(item), "danger"))],
    ];
    this.list.replaceChildren(table("Prices", columns, items, { none: "No prices of your own. The prices of the catalogue apply." }));
    const own = new Set(items.map(({ id }) => id));
    const rows = [
      ["Model", ({ id, kind }) => element("span", { className: "entry" }, element("b", {}, id), kind === "chat" ? null : element("small", {}, kind)), "wide"],
      ...KINDS.slice(0, 4).map(([kind, title]) => [title, ({ price }) => money(price?.[kind]), "number"]),
      ["Long input", ({ price }) => longInput(price)],
      ["Context", ({ context }) => count(context), "number"],
      ["As of", ({ as_of, source }) => element("span", { title: source }, as_of)],
      ["", (row) => (own.has(row.id) ? "overridden" : button("Override", () => this.edit({ id: row.id, value: row.price ?? {}, version: 0 })))],
    ];
    this.catalogue.replaceChildren(table("Catalogue", rows, catalogue));
  }

  remove({ id }) {
    openConfirmDialog("Delete this price?", `The price of ${id} in the catalogue will apply.`, "Delete", async () => {
      await this.api.send("DELETE", path(id));
      await this.show();
    });
  }

  edit(old) {
    const shown = (kind) => (old?.value[kind] == null ? "" : old.value[kind] / MILLION);
    const fields = [
      field({ name: "id", label: "Model", value: old?.id ?? "", required: true, wide: true, pattern: ".+/.+", placeholder: "openai/gpt-5", readOnly: Boolean(old) }),
      ...KINDS.map(([kind, label], i) => field({ name: kind, label, kind: "number", min: 0, step: "any", value: shown(kind), required: i < 2 })),
    ];
    const dialogForm = form(fields, "Save", async ({ id, ...values }) => {
      const price = Object.fromEntries(KINDS.map(([kind]) => [kind, values[kind] === "" ? null : Math.round(Number(values[kind]) * MILLION)]));
      await this.api.send("PUT", `${path(id)}${old?.version ? `?version=${old.version}` : ""}`, { ...old?.value, ...price });
      await this.show();
      closeDialog();
    });
    dialogForm.id = "price-form";
    openDialog(old ? `Price of ${old.id}` : "Set a price", dialogForm);
  }
}
