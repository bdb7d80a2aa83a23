/** Prices of the account's own, over those of the catalogue. In dollars per million tokens, as providers write them. */

import { element } from "../dom.js";
import { money } from "./figures.js";
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

export async function prices(session, where) {
  return new Prices(session.api, where).open();
}

class Prices {
  constructor(api, where) {
    Object.assign(this, { api, where });
    this.found = element("section", { className: "card", id: "prices-found" });
  }

  async open() {
    await this.show();
    const make = button("Set a price", () => this.edit(null), "primary");
    make.id = "new-price";
    return element("div", {}, head("Prices", "Your own, in dollars per million tokens. What is not here costs what the catalogue says; what is in neither has no cost.", make), this.found);
  }

  async show() {
    const items = await this.api.all("prices", this.where.signal);
    const columns = [
      ["Model", ({ id }) => element("b", {}, id), "wide"],
      ...KINDS.slice(0, 4).map(([kind, title]) => [title, ({ value }) => money(value[kind]), "number"]),
      ["Long input", ({ value }) => (value.long ? `from ${value.long.above} tokens` : "–")],
      ["", (item) => element("span", { className: "actions" }, button("Change", () => this.edit(item)), button("Delete", () => this.remove(item), "danger"))],
    ];
    this.found.replaceChildren(table("Prices", columns, items, { none: "The catalogue's prices hold." }));
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
      await this.api.send("PUT", `${path(id)}${old ? `?version=${old.version}` : ""}`, { ...old?.value, ...told });
      await this.show();
      done();
    });
    wanted.id = "price-form";
    ask(old ? `The price of ${old.id}` : "Set a price", wanted);
  }
}
