/** A table of log records. */

import { NONE, costOf, count, formatRecent, millis } from "./format.js";
import { element } from "../dom.js";
import { link, pill, table } from "./components.js";

export function records(label, items, none = "No requests yet.") {
  const columns = [
    ["Time", (r) => link(`#/logs/${r.id}`, formatRecent(r.created_at ? Date.parse(r.created_at) : null)), "number"],
    ["Status", status],
    ["Model", (r) => element("span", { className: "entry" }, element("b", {}, r.model || r.path || NONE), element("small", {}, r.provider)), "wide"],
    ["Tokens", (r) => `${count(r.tokens_in)} → ${count(r.tokens_out)}`, "number extra"],
    ["Cost", costOf, "number extra"],
    ["Duration", (r) => millis(r.duration), "number extra"],
    ["User or key", (r) => r.user || keyName(r.key_id), "extra"],
    ["", (r) => element("span", {}, element("span", { className: "badges" }, ...badges(r)), r.message ? element("span", { className: "reason", title: r.message }, shorten(r.message)) : null), "outcome"],
  ];
  return table(label, columns, items, { none, open: (r) => (location.hash = `#/logs/${r.id}`) });
}

const MAX_REASON_CHARS = 160;
const shorten = (text) => (text.length > MAX_REASON_CHARS ? `${text.slice(0, MAX_REASON_CHARS)}…` : text);

/** Shorten the id of a key that is a hash. */
const keyName = (id) => (/^[0-9a-f]{16}$/.test(id) ? id.slice(0, 8) : id) || NONE;

/** The outcome of a request, as a sign, a status and a colour. */
export function status(record) {
  const [sign, tone, outcome] = record.success ? ["✓", "good", "answered"] : record.ended === "left" ? ["–", "mild", "the client left"] : ["✕", "bad", "failed"];
  const text = record.success || record.ended === "error" ? record.status_code : `${record.status_code} ${record.ended}`;
  const node = pill(`${sign} ${text}`, tone);
  node.title = outcome;
  return node;
}

export function badges(record) {
  const result = [];
  if (record.cached) result.push(pill("◆ cached", "cached"));
  if (record.step && record.success) result.push(pill("▲ fallback", "fallback"));
  else if (record.step) result.push(pill(`step ${record.step}`, "mild"));
  if (record.attempts > 1) result.push(pill(`${record.attempts} attempts`, "mild"));
  if (record.feedback) result.push(pill(record.feedback > 0 ? "liked" : "disliked", record.feedback > 0 ? "good" : "bad"));
  if (record.error) result.push(pill(record.error, "bad"));
  return result;
}
