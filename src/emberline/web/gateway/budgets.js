/** Budgets: rules over requests, tokens or money, for everybody together or for each one apart. */

import { element } from "../dom.js";
import { NONE, count, money, percent, until } from "./figures.js";
import { acting, ask, button, confirmed, done, field, form, head, list, pill, table } from "./parts.js";
import { part } from "./api.js";

const MILLION = 1_000_000;
const PERIODS = ["minute", "hour", "day", "week", "month"];

const PERIOD = 3000; // ms between two looks at what was spent
const SHOWN = 4; // buckets of a budget: the fullest

export async function budgets(session, where) {
  const page = new Budgets(session, where);
  const node = await page.open();
  page.follow();
  return node;
}

class Budgets {
  constructor(session, where) {
    Object.assign(this, { session, api: session.api, where });
    this.found = element("section", { className: "card", id: "budgets-found" });
    this.fixed = element("section", { className: "card", id: "budgets-fixed", hidden: true });
  }

  async open() {
    await this.show();
    const make = button("New budget", () => this.edit(null), "primary");
    make.id = "new-budget";
    return element("div", {}, head("Budgets", "At most so much in a stretch of time. A request that would go over is refused before it is sent.", make), this.found, this.fixed);
  }

  async show() {
    const items = await this.api.all("budgets", this.where.signal);
    const columns = [
      ["Name", ({ value: { rule } }) => element("b", {}, rule.name), "wide"],
      ["Spent", ({ id, value }) => element("div", { className: "spent", data: { spent: id, none: value.enabled ? "nothing yet" : NONE } })],
      ["At most", ({ value: { rule } }) => amount(rule, rule.limit), "number"],
      ["Per", ({ value: { rule } }) => (typeof rule.per === "number" ? `${rule.per} s` : rule.per)],
      ["For each", ({ value: { rule } }) => rule.split.join(", ") || "all together"],
      ["Only", ({ value: { rule } }) => Object.entries(rule.only).map(([name, values]) => `${name}: ${values.join(", ")}`).join("; ") || (rule.named ? "keys that name it" : "everything")],
      ["Gateways", ({ value }) => value.gateways.join(", ")],
      ["State", ({ value }) => (value.enabled ? pill("holds", "good") : pill("off", "bad"))],
      ["", (item) => element("span", { className: "actions" }, ...this.actions(item))],
    ];
    this.found.replaceChildren(table("Budgets", columns, items, { none: "No budgets of the account." }));
    this.ours = new Set(items.map(({ id }) => id));
    await this.look();
  }

  async follow() {
    const { signal } = this.where;
    while (!signal.aborted) {
      await new Promise((wake) => setTimeout(wake, PERIOD));
      if (!document.hidden && !signal.aborted) await this.look();
    }
  }

  /** What was spent is the limiter's to say: if it cannot, the figures are dashes, and the budgets are still shown. */
  async look() {
    let items = null;
    try {
      ({ items } = await this.api.get("spent", { gateway: this.session.gateway }, this.where.signal));
      this.where.live("ready", "live");
    } catch (error) {
      if (error.status === 401) return this.where.expelled(error);
      if (!this.where.signal.aborted) this.where.live("offline", error.message);
    }
    for (const node of this.found.querySelectorAll("[data-spent]")) node.replaceChildren(...meters(items?.filter(({ budget }) => budget === node.dataset.spent), node.dataset.none));
    const fixed = items?.filter(({ budget }) => !this.ours.has(budget)) ?? [];
    this.fixed.hidden = !fixed.length;
    const columns = [["Name", ({ budget }) => element("b", {}, budget)], ["Spent", (item) => element("div", { className: "spent" }, meter(item)), "wide"]];
    this.fixed.replaceChildren(element("h3", {}, "Of gateways ", element("small", {}, "in their own settings")), table("Budgets of gateways", columns, fixed));
  }

  actions({ id, version, value }) {
    const path = `budgets/${part(id)}`;
    const turn = acting(async () => {
      await this.api.send("PATCH", `${path}?version=${version}`, { enabled: !value.enabled });
      await this.show();
    });
    const remove = () =>
      confirmed("Delete this budget?", `${id} will no longer hold.`, "Delete", async () => {
        await this.api.send("DELETE", path);
        await this.show();
      });
    return [button(value.enabled ? "Turn off" : "Turn on", turn), button("Change", () => this.edit({ id, version, value })), button("Delete", remove, "danger")];
  }

  edit(old) {
    const rule = old?.value.rule;
    const wanted = form(fields(rule, old?.value), old ? "Save" : "Make the budget", async (given) => {
      const body = { ...old?.value, gateways: list(given.gateways), rule: { ...rule, ...wish(given) } };
      const path = `budgets/${part(given.name)}`;
      await (old ? this.api.send("PUT", `${path}?version=${old.version}`, body) : this.api.send("POST", path, body));
      await this.show();
      done();
    });
    wanted.id = "budget-form";
    ask(old ? `Change ${old.id}` : "New budget", wanted);
  }
}

const amount = ({ amount: of }, value) => (of === "micros" ? money(value) : `${count(value)} ${of}`);

/** `items`: of one budget, the fullest first; null if it is not known. */
function meters(items, none) {
  if (!items) return [NONE];
  const more = items.length - SHOWN;
  const shown = items.slice(0, SHOWN).map(meter);
  return items.length ? [...shown, more > 0 ? element("small", {}, `and ${more} more`) : ""] : [element("small", {}, none)];
}

function meter(item) {
  const part = item.used / Math.max(1, item.limit);
  const bar = element("span", { className: "share" });
  bar.style.setProperty("--share", Math.min(1, part));
  const whose = [item.gateway, ...Object.values(item.split).map((value) => value || NONE)].join(" · ");
  const ends = item.ends === null ? "sliding" : `until ${until(item.ends)}`;
  return element(
    "div",
    { className: `meter ${part >= 1 ? "full" : part >= 0.8 ? "near" : ""}`, title: `${percent(part)} of ${amount(item, item.limit)}` },
    element("span", {}, element("b", {}, item.amount === "micros" ? money(item.used) : count(item.used)), ` of ${amount(item, item.limit)}`),
    bar,
    element("small", {}, `${whose} · ${ends}`),
  );
}

function fields(rule, value) {
  const periods = rule && !PERIODS.includes(rule.per) ? [[String(rule.per), `${rule.per} s`], ...PERIODS] : PERIODS;
  const limit = rule ? (rule.amount === "micros" ? rule.limit / MILLION : rule.limit) : "";
  return [
    field({ name: "name", label: "Name", value: rule?.name ?? "", required: true, maxLength: 64, pattern: "[A-Za-z0-9_.\\-]+", readOnly: Boolean(rule) }),
    field({ name: "limit", label: "At most", kind: "number", min: 0, step: "any", required: true, value: limit }),
    field({ name: "amount", label: "Of", kind: "select", value: rule?.amount ?? "micros", options: [["micros", "dollars"], ["tokens", "tokens"], ["requests", "requests"]] }),
    field({ name: "per", label: "Per", kind: "select", value: String(rule?.per ?? "day"), options: periods }),
    field({ name: "technique", label: "Window", kind: "select", value: rule?.technique ?? "fixed", options: ["fixed", "sliding"] }),
    field({ name: "split", label: "For each", value: rule?.split.join(", ") ?? "", hint: "key, user, model, provider, metadata.team; empty: all together" }),
    field({ name: "gateways", label: "Gateways", value: value?.gateways.join(", ") ?? "*" }),
    field({ name: "named", label: "Only for keys that name it", kind: "check", value: rule?.named ?? false }),
    field({ name: "pass", label: "Let models without a price pass", kind: "check", value: rule?.unpriced === "pass" }),
  ];
}

const wish = (given) => ({
  name: given.name,
  limit: Math.round(Number(given.limit) * (given.amount === "micros" ? MILLION : 1)),
  amount: given.amount,
  per: /^\d+$/.test(given.per) ? Number(given.per) : given.per,
  technique: given.technique,
  split: list(given.split),
  named: given.named,
  unpriced: given.pass ? "pass" : "refuse",
});
