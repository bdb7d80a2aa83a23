/** Prices: the account's own, and below them the catalogue's. In dollars per million tokens, as providers write them. */

import { element } from "../dom.js";
import { NONE, count, money } from "./figures.js";
import { ask, button, confirmed, done, field, form, head, table } from "./parts.js";
import { part } from "./api.js";

const MILLION = 1_000_000;
const KINDS = [
  ["input", "Input"],
  ["output", "Output"],
  ["cached_read", "Cached input"],
  ["cache_write", "Written to a cache"],
  ["cache_write_long", "Written for longer"],
  ["audio", "Audio"],
  ["image", "Images"],
];
const path = (id) => `prices/${id.split("/").map(part).join("/")}`;

const long = (price) => (price?.long ? `from ${count(price.long.above)} tokens` : NONE);
const section = (title, body) => element("section", { className: "card" }, element("h3", {}, title), body);

export async function prices(session, where) {
  return new Prices(session.api, where).open();
}

class Prices {
  constructor(api, where) {
    Object.assign(this, { api, where });
    this.found = element("div", { id: "prices-found" });
    this.catalogue = element("div", { id: "catalogue" });
  }

  async open() {
    await this.show();
    const make = button("Set a price", () => this.edit(null), "primary");
    make.id = "new-price";
    return element("div", {}, head("Prices", "Your own, in dollars per million tokens. They take precedence over the catalogue; a model in neither has no cost.", make), section("Your prices", this.found), section("Catalogue", this.catalogue));
  }

  async show() {
    const [items, known] = await Promise.all([this.api.all("prices", this.where.signal), this.api.all("catalogue", this.where.signal)]);
    const columns = [
      ["Model", ({ id }) => element("b", {}, id), "wide"],
      ...KINDS.slice(0, 4).map(([kind, title]) => [title, ({ value }) => money(value[kind]), "number"]),
      ["Long input", ({ value }) => long(value)],
      ["", (item) => element("span", { className: "actions" }, button("Change", () => this.edit(item)), button("Delete", () => this.remove(item), "danger"))],
    ];
    this.found.replaceChildren(table("Prices", columns, items, { none: "The catalogue's prices apply." }));
    const own = new Set(items.map(({ id }) => id));
    const rows = [
      ["Model", ({ id, kind }) => element("span", { className: "place" }, element("b", {}, id), kind === "chat" ? null : element("small", {}, kind)), "wide"],
      ...KINDS.slice(0, 4).map(([kind, title]) => [title, ({ price }) => money(price?.[kind]), "number"]),
      ["Long input", ({ price }) => long(price)],
      ["Context", ({ context }) => count(context), "number"],
      ["As of", ({ as_of, source }) => element("span", { title: source }, as_of)],
      ["", (row) => (own.has(row.id) ? "overridden" : button("Override", () => this.edit({ id: row.id, value: row.price ?? {}, version: 0 })))],
    ];
    this.catalogue.replaceChildren(table("Catalogue", rows, known));
  }

  remove({ id }) {
    confirmed("Delete this price?", `${id} will cost what the catalogue says.`, "Delete", async () => {
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
    const wanted = form(fields, "Save", async ({ id, ...given }) => {
      const told = Object.fromEntries(KINDS.map(([kind]) => [kind, given[kind] === "" ? null : Math.round(Number(given[kind]) * MILLION)]));
      await this.api.send("PUT", `${path(id)}${old?.version ? `?version=${old.version}` : ""}`, { ...old?.value, ...told });
      await this.show();
      done();
    });
    wanted.id = "price-form";
    ask(old ? `The price of ${old.id}` : "Set a price", wanted);
  }
}
