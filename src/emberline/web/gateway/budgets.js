/** Budgets: limits on requests, tokens or money, for all callers together or for each value of an attribute. */

import { element } from "../dom.js";
import { NONE, count, formatEnd, money, percent } from "./format.js";
import { withErrorToast, openDialog, button, openConfirmDialog, closeDialog, field, form, head, list, pill, table } from "./components.js";
import { segment } from "./api.js";

const MILLION = 1_000_000;
const PERIODS = ["minute", "hour", "day", "week", "month"];

const POLL_MS = 3000;
const MAX_METERS = 4; // per budget, the most used first

export async function budgets(session, context) {
  const page = new Budgets(session, context);
  const node = await page.open();
  page.follow();
  return node;
}

class Budgets {
  constructor(session, context) {
    Object.assign(this, { session, api: session.api, context });
    this.list = element("section", { className: "card", id: "budgets-found" });
    this.configured = element("section", { className: "card", id: "budgets-configured", hidden: true });
  }

  async open() {
    await this.show();
    const make = button("New budget", () => this.edit(null), "primary");
    make.id = "new-budget";
    return element("div", {}, head("Budgets", "Limits on money, tokens or requests per time window. A request that would exceed one is rejected before it is sent.", make), this.list, this.configured);
  }

  async show() {
    const items = await this.api.all("budgets", this.context.signal);
    const columns = [
      ["Name", ({ value: { rule } }) => element("b", {}, rule.name), "wide"],
      ["Spent", ({ id, value }) => element("div", { className: "spent", data: { spent: id, none: value.enabled ? "nothing yet" : NONE } })],
      ["Limit", ({ value: { rule } }) => amount(rule, rule.limit), "number"],
      ["Window", ({ value: { rule } }) => (typeof rule.per === "number" ? `${rule.per} s` : rule.per)],
      ["Split by", ({ value: { rule } }) => rule.split.join(", ") || "not split"],
      ["Applies to", ({ value: { rule } }) => Object.entries(rule.only).map(([name, values]) => `${name}: ${values.join(", ")}`).join("; ") || (rule.named ? "keys that list it" : "all requests")],
      ["Gateways", ({ value }) => value.gateways.join(", ")],
      ["State", ({ value }) => (value.enabled ? pill("on", "good") : pill("off", "bad"))],
      ["", (item) => element("span", { className: "actions" }, ...this.actions(item))],
    ];
    this.list.replaceChildren(table("Budgets", columns, items, { none: "This account has no budgets." }));
    this.accountBudgets = new Set(items.map(({ id }) => id));
    await this.loadUsage();
  }

  async follow() {
    const { signal } = this.context;
    while (!signal.aborted) {
      await new Promise((wake) => setTimeout(wake, POLL_MS));
      if (!document.hidden && !signal.aborted) await this.loadUsage();
    }
  }

  /** Load the usage from the limiter. If that fails, usage is shown as dashes and the budgets stay visible. */
  async loadUsage() {
    let items = null;
    try {
      ({ items } = await this.api.get("spent", { gateway: this.session.gateway }, this.context.signal));
      this.context.showState("ready", "live");
    } catch (error) {
      if (error.status === 401) return this.context.signedOut(error);
      if (!this.context.signal.aborted) this.context.showState("offline", error.message);
    }
    for (const node of this.list.querySelectorAll("[data-spent]")) node.replaceChildren(...meters(items?.filter(({ budget }) => budget === node.dataset.spent), node.dataset.none));
    const configured = items?.filter(({ budget }) => !this.accountBudgets.has(budget)) ?? [];
    this.configured.hidden = !configured.length;
    const columns = [["Name", ({ budget }) => element("b", {}, budget)], ["Spent", (item) => element("div", { className: "spent" }, meter(item)), "wide"]];
    this.configured.replaceChildren(element("h3", {}, "Budgets of gateways ", element("small", {}, "set in the settings of a gateway")), table("Budgets of gateways", columns, configured));
  }

  actions({ id, version, value }) {
    const path = `budgets/${segment(id)}`;
    const toggle = withErrorToast(async () => {
      await this.api.send("PATCH", `${path}?version=${version}`, { enabled: !value.enabled });
      await this.show();
    });
    const remove = () =>
      openConfirmDialog("Delete this budget?", `${id} will no longer limit requests.`, "Delete", async () => {
        await this.api.send("DELETE", path);
        await this.show();
      });
    return [button(value.enabled ? "Turn off" : "Turn on", toggle), button("Change", () => this.edit({ id, version, value })), button("Delete", remove, "danger")];
  }

  edit(old) {
    const rule = old?.value.rule;
    const dialogForm = form(fields(rule, old?.value), old ? "Save" : "Create budget", async (values) => {
      const body = { ...old?.value, gateways: list(values.gateways), rule: { ...rule, ...ruleFrom(values) } };
      const path = `budgets/${segment(values.name)}`;
      await (old ? this.api.send("PUT", `${path}?version=${old.version}`, body) : this.api.send("POST", path, body));
      await this.show();
      closeDialog();
    });
    dialogForm.id = "budget-form";
    openDialog(old ? `Change ${old.id}` : "New budget", dialogForm);
  }
}

const amount = ({ amount: unit }, value) => (unit === "micros" ? money(value) : `${count(value)} ${unit}`);

/** `items`: the usage of one budget, the most used first; null if unknown. */
function meters(items, none) {
  if (!items) return [NONE];
  const more = items.length - MAX_METERS;
  const shown = items.slice(0, MAX_METERS).map(meter);
  return items.length ? [...shown, more > 0 ? element("small", {}, `and ${more} more`) : ""] : [element("small", {}, none)];
}

function meter(item) {
  const fraction = item.used / Math.max(1, item.limit);
  const bar = element("span", { className: "share" });
  bar.style.setProperty("--share", Math.min(1, fraction));
  const scope = [item.gateway, ...Object.values(item.split).map((value) => value || NONE)].join(" · ");
  const ends = item.ends === null ? "sliding" : `until ${formatEnd(item.ends)}`;
  return element(
    "div",
    { className: `meter ${fraction >= 1 ? "full" : fraction >= 0.8 ? "near" : ""}`, title: `${percent(fraction)} of ${amount(item, item.limit)}` },
    element("span", {}, element("b", {}, item.amount === "micros" ? money(item.used) : count(item.used)), ` of ${amount(item, item.limit)}`),
    bar,
    element("small", {}, `${scope} · ${ends}`),
  );
}

function fields(rule, value) {
  const periods = rule && !PERIODS.includes(rule.per) ? [[String(rule.per), `${rule.per} s`], ...PERIODS] : PERIODS;
  const limit = rule ? (rule.amount === "micros" ? rule.limit / MILLION : rule.limit) : "";
  return [
    field({ name: "name", label: "Name", value: rule?.name ?? "", required: true, maxLength: 64, pattern: "[A-Za-z0-9_.\\-]+", readOnly: Boolean(rule) }),
    field({ name: "limit", label: "Limit", kind: "number", min: 0, step: "any", required: true, value: limit }),
    field({ name: "amount", label: "Unit", kind: "select", value: rule?.amount ?? "micros", options: [["micros", "dollars"], ["tokens", "tokens"], ["requests", "requests"]] }),
    field({ name: "per", label: "Per", kind: "select", value: String(rule?.per ?? "day"), options: periods }),
    field({ name: "technique", label: "Window type", kind: "select", value: rule?.technique ?? "fixed", options: ["fixed", "sliding"] }),
    field({ name: "split", label: "Split by", value: rule?.split.join(", ") ?? "", hint: "key, user, model, provider or metadata.team; empty: one limit for all" }),
    field({ name: "gateways", label: "Gateways", value: value?.gateways.join(", ") ?? "*" }),
    field({ name: "named", label: "Only for keys that list this budget", kind: "check", value: rule?.named ?? false }),
    field({ name: "pass", label: "Allow models without a price", kind: "check", value: rule?.unpriced === "pass" }),
  ];
}

const ruleFrom = (values) => ({
  name: values.name,
  limit: Math.round(Number(values.limit) * (values.amount === "micros" ? MILLION : 1)),
  amount: values.amount,
  per: /^\d+$/.test(values.per) ? Number(values.per) : values.per,
  technique: values.technique,
  split: list(values.split),
  named: values.named,
  unpriced: values.pass ? "pass" : "refuse",
});
