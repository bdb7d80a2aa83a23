/** The log explorer: filters in the URL, pages by cursor, and the page of one record. */

import { element } from "../dom.js";
import { button, field, head, link, list, values } from "./components.js";
import { record } from "./record.js";
import { records } from "./records.js";

const PAGE = 50;
const AGES = [["", "any time"], ["3600", "last hour"], ["86400", "last day"], ["604800", "last week"], ["2592000", "last 30 days"]];
/** Filters that are passed to the server unchanged. */
const PASSED_FILTERS = ["success", "cached", "rescued", "status", "provider", "model", "key_id", "user", "error", "feedback", "session_id", "event_id", "min_cost", "min_tokens_out", "min_duration"];

export async function logs(session, context) {
  if (context.rest[0]) return record(session, context, context.rest[0]);
  return new Explorer(session, context).open();
}

class Explorer {
  constructor(session, context) {
    Object.assign(this, { session, context, cursors: [] });
    this.records = element("div", { id: "records" });
    this.foot = element("div", { className: "pager" });
  }

  async open() {
    await this.show("");
    const back = this.context.query.size ? link("#/logs", "Clear filters") : null;
    return element("div", {}, head("Logs", "Newest first. There is one record for each request.", back), this.filters(), this.records, this.foot);
  }

  filters() {
    const current = (name) => this.context.query.get(name) ?? "";
    const choice = (name, label, options) => field({ name, label, kind: "select", options, value: current(name) });
    const text = (name, label, more = {}) => field({ name, label, value: current(name), ...more });
    const amount = (name, label, more = {}) => text(name, label, { kind: "number", min: 0, ...more });
    const common = [
      choice("age", "Time", AGES),
      choice("success", "Outcome", [["", "any"], ["true", "answered"], ["false", "failed"]]),
      text("provider", "Provider"),
      text("model", "Model"),
      text("user", "User"),
    ];
    const advanced = [
      text("status", "Status", { placeholder: "429, 500", inputMode: "numeric" }),
      text("error", "Error code"),
      choice("cached", "Cache", [["", "any"], ["true", "hit"], ["false", "miss"]]),
      choice("rescued", "Fallback", [["", "any"], ["true", "answered by a fallback"], ["false", "no fallback"]]),
      choice("feedback", "Feedback", [["", "any"], ["1", "liked"], ["-1", "disliked"]]),
      amount("min_cost", "Min. cost, $", { step: "any" }),
      amount("min_tokens_out", "Min. output tokens"),
      amount("min_duration", "Min. duration, ms"),
      text("key_id", "Key"),
      text("session_id", "Session"),
      text("event_id", "Event"),
      text("metadata", "Metadata", { placeholder: "team=blue" }),
      text("id", "Record id"),
    ];
    const isOpen = advanced.some((label) => label.control.value);
    const more = element("details", { open: isOpen }, element("summary", {}, "More filters"), element("div", { className: "fields" }, ...advanced));
    const send = element("button", { type: "submit", className: "primary" }, "Find");
    const form = element("form", { id: "filters", className: "filters card" }, element("div", { className: "fields" }, ...common, send), more);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const filters = Object.entries(values(form)).filter(([, value]) => value);
      location.hash = `#/logs${filters.length ? `?${new URLSearchParams(filters)}` : ""}`;
    });
    return form;
  }

  query() {
    const query = Object.fromEntries(PASSED_FILTERS.map((name) => [name, list(this.context.query.get(name) ?? "").join(",")]));
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
    const page = await this.session.api.get("logs", { ...this.query(), gateway: this.session.gateway, before, limit: PAGE }, this.context.signal);
    this.records.replaceChildren(records("Records", page.items, page.complete ? "No record matches these filters." : "No match found so far."));
    const older = button(page.complete ? "Older" : "Search older records", () => this.move([...this.cursors, before], page.cursor));
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
