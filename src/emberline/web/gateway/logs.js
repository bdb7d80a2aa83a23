/** The log explorer: filters that live in the address, pages by cursor, and one record opened. */

import { element } from "../dom.js";
import { button, field, head, link, list, values } from "./parts.js";
import { record } from "./record.js";
import { records } from "./records.js";

const PAGE = 50;
const AGES = [["", "any time"], ["3600", "last hour"], ["86400", "last day"], ["604800", "last week"], ["2592000", "last 30 days"]];
/** Names in the address that go to the server as they are. */
const PLAIN = ["success", "cached", "rescued", "status", "provider", "model", "key_id", "user", "error", "feedback", "session_id", "event_id", "min_cost", "min_tokens_out", "min_duration"];

export async function logs(session, where) {
  if (where.rest[0]) return record(session, where, where.rest[0]);
  return new Explorer(session, where).open();
}

class Explorer {
  constructor(session, where) {
    Object.assign(this, { session, where, trail: [] });
    this.found = element("div", { id: "records" });
    this.foot = element("div", { className: "pager" });
  }

  async open() {
    await this.show("");
    const back = this.where.query.size ? link("#/logs", "Clear the filters") : null;
    return element("div", {}, head("Logs", "Newest first. Every request leaves one record.", back), this.filters(), this.found, this.foot);
  }

  filters() {
    const given = (name) => this.where.query.get(name) ?? "";
    const choice = (name, label, options) => field({ name, label, kind: "select", options, value: given(name) });
    const text = (name, label, more = {}) => field({ name, label, value: given(name), ...more });
    const amount = (name, label, more = {}) => text(name, label, { kind: "number", min: 0, ...more });
    const usual = [
      choice("age", "Time", AGES),
      choice("success", "Outcome", [["", "any"], ["true", "answered"], ["false", "failed"]]),
      text("provider", "Provider"),
      text("model", "Model"),
      text("user", "User"),
    ];
    const rarer = [
      text("status", "Status", { placeholder: "429, 500", inputMode: "numeric" }),
      text("error", "Error code"),
      choice("cached", "Cache", [["", "any"], ["true", "hit"], ["false", "miss"]]),
      choice("rescued", "Rescued", [["", "any"], ["true", "by a fallback"], ["false", "not"]]),
      choice("feedback", "Feedback", [["", "any"], ["1", "liked"], ["-1", "disliked"]]),
      amount("min_cost", "At least, $", { step: "any" }),
      amount("min_tokens_out", "Tokens out, at least"),
      amount("min_duration", "At least, ms"),
      text("key_id", "Key"),
      text("session_id", "Session"),
      text("event_id", "Event"),
      text("metadata", "Metadata", { placeholder: "team=blue" }),
      text("id", "Record"),
    ];
    const isOpen = rarer.some((label) => label.control.value);
    const more = element("details", { open: isOpen }, element("summary", {}, "More filters"), element("div", { className: "fields" }, ...rarer));
    const send = element("button", { type: "submit", className: "primary" }, "Find");
    const form = element("form", { id: "filters", className: "filters card" }, element("div", { className: "fields" }, ...usual, send), more);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const asked = Object.entries(values(form)).filter(([, value]) => value);
      location.hash = `#/logs${asked.length ? `?${new URLSearchParams(asked)}` : ""}`;
    });
    return form;
  }

  query() {
    const asked = Object.fromEntries(PLAIN.map((name) => [name, list(this.where.query.get(name) ?? "").join(",")]));
    const age = Number(this.where.query.get("age"));
    if (age) asked.since = Date.now() - 1000 * age;
    asked.id = (this.where.query.get("id") ?? "").toLowerCase();
    for (const pair of list(this.where.query.get("metadata") ?? "")) {
      const [name, ...value] = pair.split("=");
      asked[`metadata.${name.trim()}`] = value.join("=").trim();
    }
    return asked;
  }

  /** `before`: the cursor of the page before. The way back is remembered: a cursor only points to what is older. */
  async show(before) {
    const page = await this.session.api.get("logs", { ...this.query(), gateway: this.session.gateway, before, limit: PAGE }, this.where.signal);
    this.found.replaceChildren(records("Records", page.items, page.complete ? "No record passes these filters." : "None found so far."));
    const older = button(page.complete ? "Older" : "Look further back", () => this.move([...this.trail, before], page.cursor));
    const newer = button("Newer", () => this.move(this.trail.slice(0, -1), this.trail.at(-1)));
    older.disabled = !page.has_more;
    newer.disabled = !this.trail.length;
    const told = page.complete ? "" : "This was as far as one look goes; there may be more.";
    this.foot.replaceChildren(newer, older, element("span", {}, told));
  }

  async move(trail, before) {
    this.trail = trail;
    await this.show(before);
    document.getElementById("main").scrollTop = 0;
  }
}
