/** Records: rows of the log as a table. */

import { NONE, count, millis, moment, money } from "./figures.js";
import { element } from "../dom.js";
import { link, pill, table } from "./parts.js";

export function records(label, items, none = "No requests yet.") {
  const columns = [
    ["Time", (r) => link(`#/logs/${r.id}`, moment(r.created_at ? Date.parse(r.created_at) : null)), "number"],
    ["Status", status],
    ["Model", (r) => element("span", { className: "place" }, element("b", {}, r.model || NONE), element("small", {}, r.provider)), "wide"],
    ["Tokens", (r) => `${count(r.tokens_in)} → ${count(r.tokens_out)}`, "number"],
    ["Cost", (r) => money(r.micros), "number"],
    ["Took", (r) => millis(r.duration), "number"],
    ["Who", (r) => r.user || keyName(r.key_id)],
    ["", (r) => element("span", { className: "marks" }, ...marks(r))],
  ];
  return table(label, columns, items, { none, open: (r) => (location.hash = `#/logs/${r.id}`) });
}

/** Hashes are known by their beginning. */
const keyName = (id) => (/^[0-9a-f]{16}$/.test(id) ? id.slice(0, 8) : id) || NONE;

export function status(record) {
  const tone = record.success ? "good" : record.ended === "left" ? "mild" : "bad";
  const text = record.success || record.ended === "error" ? record.status_code : `${record.status_code} ${record.ended}`;
  return pill(String(text), tone);
}

export function marks(record) {
  const found = [];
  if (record.cached) found.push(pill("cached", "good"));
  if (record.step) found.push(pill(`step ${record.step}`, "mild"));
  if (record.attempts > 1) found.push(pill(`${record.attempts} tries`, "mild"));
  if (record.feedback) found.push(pill(record.feedback > 0 ? "liked" : "disliked", record.feedback > 0 ? "good" : "bad"));
  if (record.error) found.push(pill(record.error, "bad"));
  return found;
}
