/** The log explorer: filters in the URL, pages by cursor, and the page of one record. */

import { element } from "../dom.js";
import { button, choices, field, head, link, list, values } from "./components.js";
import { record } from "./record.js";
import { count } from "./format.js";
import { records } from "./records.js";

const PAGE = 50;
const RECONNECT_MS = 5000;
const SILENCE_MS = 60_000; // the gateway sends at least an empty line every 15 s
const DAY = 86_400_000;
const LISTED_DAYS = 30; // of which the values of filters are listed
/** filter -> its name on the page */
const LISTED_FILTERS = {
  provider: "Provider",
  model: "Model",
  user: "User",
  key_id: "Key",
  status: "Status",
  error: "Error code",
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
    this.page = { items: [] };
    this.newIds = new Set(); // of records that came by the stream and are not drawn yet
    this.arrivedWhileLoading = null;
    this.drawing = 0; // at most one redraw per frame
    this.live = element("input", { type: "checkbox", id: "live-tail", checked: true });
    this.live.addEventListener("change", () => this.live.checked && !this.cursors.length && this.show(""));
    this.lists = Object.fromEntries(
      Object.entries(LISTED_FILTERS).map(([name, label]) => [
        name,
        choices({ name, label, value: context.query.get(name) ?? "" }),
      ]),
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
    const { signal, showState, signedOut } = this.context;
    while (!signal.aborted) {
      try {
        await this.showNewRecords(); // the gateway ends the stream after an hour
      } catch (error) {
        if (signal.aborted) return;
        if (error.status === 401) return signedOut(error);
        showState("offline", error.message);
        await new Promise((wake) => setTimeout(wake, RECONNECT_MS));
      }
    }
  }

  async showNewRecords() {
    const { signal, showState } = this.context;
    const query = { ...this.query(), gateway: this.session.gateway };
    let isComplete = false; // the page and the records of the stream have no gap between them
    for await (const record of this.session.api.lines("logs/tail", query, signal, SILENCE_MS)) {
      showState("ready", "live");
      if (this.cursors.length || !this.live.checked) continue;
      if (!isComplete) await this.show("");
      isComplete = true;
      if (record) this.arrivedWhileLoading?.push(record) ?? this.add(record);
    }
  }

  /** Add a new record to the first page, at its place in the order of time. */
  add(record) {
    const { items } = this.page;
    if (items.some(({ id }) => id === record.id)) return;
    const merged = [record, ...items].sort((a, b) => (a.id < b.id ? 1 : -1)).slice(0, PAGE);
    const isFull = items.length === PAGE;
    this.page = { ...this.page, items: merged };
    if (isFull) Object.assign(this.page, { has_more: true, complete: true, cursor: merged.at(-1).id });
    this.newIds.add(record.id);
    this.drawing ||= requestAnimationFrame(() => {
      this.drawing = 0;
      if (!this.cursors.length) this.draw("");
    });
  }

  /** List the values that occurred recently, with the number of their requests. */
  async fillLists() {
    const { api, gateway } = this.session;
    const { signal } = this.context;
    const [values, keys] = await Promise.all([
      api.get("logs/values", { gateway, since: Date.now() - LISTED_DAYS * DAY }, signal),
      api.all("keys", signal),
    ]);
    const names = new Map(keys.map(({ id, name }) => [id, name]));
    for (const filter of Object.keys(LISTED_FILTERS)) {
      const listed = values[filter].filter(({ value }) => value && value !== OTHERS && !value.includes(","));
      this.lists[filter].setOptions(
        listed.map(({ value, requests }) => [value, names.get(value) ?? value, count(requests)]),
      );
    }
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
  async show(before) {
    const arrived = (this.arrivedWhileLoading = []);
    try {
      this.page = await this.session.api.get(
        "logs",
        { ...this.query(), gateway: this.session.gateway, before, limit: PAGE },
        this.context.signal,
      );
    } finally {
      this.arrivedWhileLoading = null;
    }
    this.draw(before);
    if (!before) arrived.forEach((record) => this.add(record));
  }

  draw(before) {
    const { page } = this;
    this.records.replaceChildren(
      records("Records", page.items, page.complete ? "No record matches these filters." : "No match found so far."),
    );
    for (const row of this.records.querySelectorAll("tbody tr"))
      row.classList.toggle("new", this.newIds.has(row.dataset.id));
    this.newIds.clear();
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
