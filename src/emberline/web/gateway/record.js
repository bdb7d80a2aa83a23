/** One log record: its figures, the full request and response, and feedback. */

import { copyButton, element, icon } from "../dom.js";
import { NONE, count, formatDateTime, millis, costOf, money } from "./format.js";
import { withErrorToast, button, empty, field, form, head, showToast } from "./components.js";
import { badges, status } from "./records.js";
import { requestMessages, responseMessages } from "./messages.js";

const MAX_SHOWN_CHARS = 200_000; // of a payload, until all of it is requested

export async function record(session, context, id) {
  const { api } = session;
  const path = `logs/${encodeURIComponent(id)}`;
  const payload = (side) => api.get(`${path}/${side}`, {}, context.signal).catch((error) => (error.status === 404 ? undefined : Promise.reject(error)));
  const [found, request, response] = await Promise.all([api.get(path, {}, context.signal), payload("request"), payload("response")]);
  const back = button("Back", () => (history.length > 1 ? history.back() : (location.hash = "#/logs")));
  const title = element("span", { className: "entry" }, found.model || found.provider || "A request", " ", status(found), ...badges(found));
  return element(
    "div",
    { id: "record", data: { id: found.id } },
    head(title, `${formatDateTime(Date.parse(found.created_at))} · ${found.id}`, back),
    element("dl", { className: "figures card" }, ...facts(found)),
    feedback(api, path, found),
    conversation(request, response),
    raw("Request", request, "request"),
    raw("Response", response, "response"),
  );
}

function facts(r) {
  const more = Object.entries(r.metadata).map(([name, value]) => [`metadata ${name}`, String(value)]);
  const usage = r.usage;
  const shown = [
    ["provider", r.provider],
    ["path", r.path],
    ["dialect", r.stream ? `${r.dialect}, streamed` : r.dialect],
    ["ended", r.ended],
    ...(r.message ? [["message", r.message]] : []),
    ["duration", millis(r.duration)],
    ["first content", millis(r.first_byte)],
    ["cost", r.custom_cost ? `${money(r.micros)} (set by the client)` : costOf(r)],
    ["tokens in", `${count(usage.input)}${usage.cached_read ? ` (${count(usage.cached_read)} cached)` : ""}`],
    ["tokens out", `${count(usage.output)}${usage.reasoning ? ` (${count(usage.reasoning)} reasoning)` : ""}${r.estimated ? ", estimated" : ""}`],
    ["step", String(r.step)],
    ["attempts", String(r.attempts)],
    ["gateway", r.gateway],
    ["key", r.key_id],
    ["user", r.user],
    ["session", r.session_id],
    ["event", r.event_id],
    ...more,
  ];
  return shown.map(([name, value]) =>
    element(
      "div",
      { className: name === "message" ? "whole" : "" },
      element("dt", {}, name),
      element("dd", {}, value || NONE),
    ),
  );
}

function feedback(api, path, found) {
  const thumb = (name, value, label) => {
    const set = withErrorToast(async () => {
      const changed = await api.send("PATCH", path, { feedback: value });
      show(changed.feedback);
      showToast("Feedback saved.");
    });
    return element("button", { type: "button", className: "icon", title: label, ariaLabel: label, data: { value: String(value) }, onclick: set }, icon(name));
  };
  const thumbs = [thumb("up", 1, "Good answer"), thumb("down", -1, "Bad answer")];
  const show = (current) => thumbs.forEach((each) => (each.ariaPressed = String(Number(each.dataset.value) === current)));
  show(found.feedback);
  const score = field({ name: "score", label: "Score", kind: "number", min: 0, max: 100, step: 1, required: true, value: found.score ?? "" });
  const scored = form([score], "Set", async ({ score }) => {
    await api.send("PATCH", path, { score: Number(score) });
    showToast("Score saved.");
  });
  return element("section", { className: "card feedback", id: "feedback" }, element("h3", {}, "Feedback"), ...thumbs, scored);
}

function conversation(request, response) {
  const messages = [...requestMessages(request), ...responseMessages(response)];
  if (!messages.length) return element("span");
  const items = messages.map(({ role, text }) => element("li", { className: `message ${role}` }, element("b", {}, role), element("p", {}, text)));
  return element("section", { className: "card" }, element("h3", {}, "Conversation"), element("ol", { className: "messages", id: "conversation" }, ...items));
}

function raw(title, payload, id) {
  const top = element("h3", {}, title);
  if (payload === undefined) return element("section", { className: "card", id }, top, empty("The payload was not logged."));
  const text = typeof payload === "string" ? payload : JSON.stringify(payload, null, 2);
  const code = element("pre", { tabIndex: 0, ariaLabel: title }, text.slice(0, MAX_SHOWN_CHARS));
  const rest = text.length > MAX_SHOWN_CHARS ? button(`Show all ${count(text.length)} characters`, (event) => (code.replaceChildren(text), event.target.remove())) : null;
  top.append(copyButton(() => text, `Copy the ${title.toLowerCase()}`));
  return element("section", { className: "card payload", id }, top, code, rest);
}
