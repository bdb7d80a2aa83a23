/** The log explorer: filters in the URL, pages by cursor, and the page of one record. */

import { element } from "../dom.js";
import { button, choices, field, head, link, list, values } from "./components.js";
import { record } from "./record.js";
import { count } from "./format.js";
import { records } from "./records.js";

const PAGE = 50;
const POLL_MS = 2000;
const DAY = 86_400_000;
const LISTED_DAYS = 30; // of which the values of filters are listed
const MAX_LISTED = 200;
/** filter -> dimension of the rollups that have its values */
const LISTED_FILTERS = {
  provider: "provider",
  model: "model",
  user: "user",
  key_id: "key",
  status: "status",
  error: "error",
};
const AGES = [
  ["", "any time"],
  ["3600", "last hour"],
  ["86400", "last day"],
  ["604800", "last week"],
  ["2592000", "last 30 days"],
];
const OTHERS = "\u2026"; // all users except the most expensive
/** Filters that are passed to the server unchanged. */
const PASSED_FILTERS = [
  "success",
  "cached",
  "rescued",
  "status",
  "provider",
  "model",
  "key_id",
  "user",
  "error",
  "feedback",
  "session_id",
  "event_id",
  "min_cost",
  "min_tokens_out",
  "min_duration",
];

export async function logs(session, context) {
  if (context.rest[0]) return record(session, context, context.rest[0]);
  return new Explorer(session, context).open();
}

class Explorer {
  constructor(session, context) {
    Object.assign(this, { session, context, cursors: [] });
    this.records = element("div", { id: "records" });
    this.shown = null; // ids of the records on the page
    this.live = element("input", { type: "checkbox", id: "live-tail", checked: true });
    this.lists = Object.fromEntries(
      Object.entries({
        provider: "Provider",
        model: "Model",
        user: "User",
        key_id: "Key",
        status: "Status",
        error: "Error code",
      }).map(([name, label]) => [name, choices({ name, label, value: context.query.get(name) ?? "" })]),
    );
    this.foot = element("div", { className: "pager" });
  }

  async open() {
    await this.show("");
    const back = this.context.query.size ? link("#/logs", "Clear filters") : null;
    const toggle = element("label", { className: "live-toggle" }, this.live, "Live");
    this.follow();
    this.fillLists().catch(() => {}); // values can be entered without the lists
    const about = "Newest first. There is one record for each request.";
    return element("div", {}, head("Logs", about, back, toggle), this.filters(), this.records, this.foot);
  }

  /** Show new records as they arrive, while the first page is shown. */
  async follow() {
    const { signal } = this.context;
    while (!signal.aborted) {
      await new Promise((wake) => setTimeout(wake, POLL_MS));
      if (document.hidden || signal.aborted || !this.live.checked || this.cursors.length) continue;
      try {
        await this.show("", { onlyIfChanged: true });
        this.context.showState("ready", "live");
      } catch (error) {
        if (signal.aborted) return;
        if (error.status === 401) return this.context.signedOut(error);
        this.context.showState("offline", error.message);
      }
    }
  }

  /** List the values that occurred recently, with the number of their requests. */
  async fillLists() {
    const { api, gateway } = this.session;
    const until = Math.ceil(Date.now() / DAY) * DAY;
    const query = {
      gateway,
      unit: "day",
      since: until - LISTED_DAYS * DAY,
      until,
      over_time: false,
      limit: MAX_LISTED,
    };
    const names = new Map((await api.all("keys", this.context.signal)).map(({ id, name }) => [id, name]));
    await Promise.all(
      Object.entries(LISTED_FILTERS).map(async ([filter, dimension]) => {
        const { items } = await api.get("rollups", { ...query, dimension }, this.context.signal);
        const counts = new Map(); // models of several providers have one name here
        for (const { value, requests } of items) {
          const name = dimension === "model" ? value.slice(value.indexOf("/") + 1) : value;
          if (name && name !== OTHERS && !name.includes(",")) counts.set(name, (counts.get(name) ?? 0) + requests);
        }
        const sorted = [...counts].sort((a, b) => b[1] - a[1]);
        this.lists[filter].setOptions(
          sorted.map(([value, requests]) => [value, names.get(value) ?? value, count(requests)]),
        );
      }),
    );
  }

  filters() {
    const current = (name) => this.context.query.get(name) ?? "";
    const choice = (name, label, options) => field({ name, label, kind: "select", options, value: current(name) });
    const text = (name, label, more = {}) => field({ name, label, value: current(name), ...more });
    const amount = (name, label, more = {}) => text(name, label, { kind: "number", min: 0, ...more });
    const common = [
      choice("age", "Time", AGES),
      choice("success", "Outcome", [
        ["", "any"],
        ["true", "answered"],
        ["false", "failed"],
      ]),
      ...["provider", "model", "user", "error"].map((name) => this.lists[name].node),
    ];
    const advanced = [
      this.lists.status.node,
      this.lists.key_id.node,
      choice("cached", "Cache", [
        ["", "any"],
        ["true", "hit"],
        ["false", "miss"],
      ]),
      choice("rescued", "Fallback", [
        ["", "any"],
        ["true", "answered by a fallback"],
        ["false", "no fallback"],
      ]),
      choice("feedback", "Feedback", [
        ["", "any"],
        ["1", "liked"],
        ["-1", "disliked"],
      ]),
      amount("min_cost", "Min. cost, $", { step: "any" }),
      amount("min_tokens_out", "Min. output tokens"),
      amount("min_duration", "Min. duration, ms"),
      text("session_id", "Session"),
      text("event_id", "Event"),
      text("metadata", "Metadata", { placeholder: "team=blue" }),
      text("id", "Record id"),
    ];
    const isOpen = advanced.some((node) => (node.control ?? node.querySelector("[type=hidden]")).value);
    const more = element(
      "details",
      { open: isOpen },
      element("summary", {}, "More filters"),
      element("div", { className: "fields" }, ...advanced),
    );
    const send = element("button", { type: "submit", className: "primary" }, "Find");
    const form = element(
      "form",
      { id: "filters", className: "filters card" },
      element("div", { className: "fields" }, ...common, send),
      more,
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const filters = Object.entries(values(form)).filter(([, value]) => value);
      location.hash = `#/logs${filters.length ? `?${new URLSearchParams(filters)}` : ""}`;
    });
    return form;
  }

  query() {
    const query = Object.fromEntries(
      PASSED_FILTERS.map((name) => [name, list(this.context.query.get(name) ?? "").join(",")]),
    );
    const age = Number(this.context.query.get("age"));
    if (age) query.since = Date.now() - 1000 * age;
    query.id = (this.context.query.get("id") ?? "").toLowerCase();
    for (const pair of list(this.context.query.get("metadata") ?? "")) {
      const [name, ...value] = pair.split("=");
      query[`metadata.${name.trim()}`] = value.join("=").trim();
    }
    return query;
  }

  /** Show the page after cursor `before`. Earlier cursors are kept for the way back, because a cursor only leads to older
      records. */
  async show(before, { onlyIfChanged = false } = {}) {
    const page = await this.session.api.get(
      "logs",
      { ...this.query(), gateway: this.session.gateway, before, limit: PAGE },
      this.context.signal,
    );
    const ids = page.items.map(({ id, feedback }) => `${id} ${feedback}`);
    if (onlyIfChanged && ids.join() === this.shown?.join()) return;
    const old = onlyIfChanged && this.shown ? new Set(this.shown) : null;
    this.shown = ids;
    this.records.replaceChildren(
      records("Records", page.items, page.complete ? "No record matches these filters." : "No match found so far."),
    );
    if (old) this.records.querySelectorAll("tbody tr").forEach((row, i) => old.has(ids[i]) || row.classList.add("new"));
    const older = button(page.complete ? "Older" : "Search older records", () =>
      this.move([...this.cursors, before], page.cursor),
    );
    const newer = button("Newer", () => this.move(this.cursors.slice(0, -1), this.cursors.at(-1)));
    older.disabled = !page.has_more;
    newer.disabled = !this.cursors.length;
    const notice = page.complete ? "" : "The search stopped at its limit; older records may match.";
    this.foot.replaceChildren(newer, older, element("span", {}, notice));
  }

  async move(cursors, before) {
    this.cursors = cursors;
    await this.show(before);
    document.getElementById("main").scrollTop = 0;
  }
}
