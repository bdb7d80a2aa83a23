/** One record of the log: its figures, what was asked and answered in full, and what people thought of it. */

import { copyButton, element, icon } from "../dom.js";
import { NONE, count, exactly, millis, money } from "./figures.js";
import { acting, button, empty, field, form, head, say } from "./parts.js";
import { marks, status } from "./records.js";
import { answer, questions } from "./speech.js";

const SHOWN = 200_000; // characters of a payload before the rest has to be asked for

export async function record(session, where, id) {
  const { api } = session;
  const path = `logs/${encodeURIComponent(id)}`;
  const payload = (side) => api.get(`${path}/${side}`, {}, where.signal).catch((error) => (error.status === 404 ? undefined : Promise.reject(error)));
  const [found, request, response] = await Promise.all([api.get(path, {}, where.signal), payload("request"), payload("response")]);
  const back = button("Back", () => (history.length > 1 ? history.back() : (location.hash = "#/logs")));
  const title = element("span", { className: "place" }, found.model || found.provider || "A request", " ", status(found), ...marks(found));
  return element(
    "div",
    { id: "record", data: { id: found.id } },
    head(title, `${exactly(Date.parse(found.created_at))} · ${found.id}`, back),
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
    ["took", millis(r.duration)],
    ["first content", millis(r.first_byte)],
    ["cost", r.custom_cost ? `${money(r.micros)} (set by the client)` : money(r.micros)],
    ["tokens in", `${count(usage.input)}${usage.cached_read ? ` (${count(usage.cached_read)} cached)` : ""}`],
    ["tokens out", `${count(usage.output)}${usage.reasoning ? ` (${count(usage.reasoning)} reasoning)` : ""}${r.estimated ? ", estimated" : ""}`],
    ["served by step", String(r.step)],
    ["tries", String(r.attempts)],
    ["gateway", r.gateway],
    ["key", r.key_id],
    ["user", r.user],
    ["session", r.session_id],
    ["event", r.event_id],
    ...more,
  ];
  return shown.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value || NONE)));
}

function feedback(api, path, found) {
  const thumb = (name, value, label) => {
    const set = acting(async () => {
      const changed = await api.send("PATCH", path, { feedback: value });
      show(changed.feedback);
      say("Thank you.");
    });
    return element("button", { type: "button", className: "icon", title: label, ariaLabel: label, data: { value: String(value) }, onclick: set }, icon(name));
  };
  const thumbs = [thumb("up", 1, "Good answer"), thumb("down", -1, "Bad answer")];
  const show = (given) => thumbs.forEach((each) => (each.ariaPressed = String(Number(each.dataset.value) === given)));
  show(found.feedback);
  const score = field({ name: "score", label: "Score", kind: "number", min: 0, max: 100, step: 1, required: true, value: found.score ?? "" });
  const scored = form([score], "Set", async ({ score }) => {
    await api.send("PATCH", path, { score: Number(score) });
    say("The score is set.");
  });
  return element("section", { className: "card feedback", id: "feedback" }, element("h3", {}, "Feedback"), ...thumbs, scored);
}

function conversation(request, response) {
  const said = [...questions(request), ...answer(response)];
  if (!said.length) return element("span");
  const turns = said.map(({ role, text }) => element("li", { className: `said ${role}` }, element("b", {}, role), element("p", {}, text)));
  return element("section", { className: "card" }, element("h3", {}, "Conversation"), element("ol", { className: "talk", id: "conversation" }, ...turns));
}

function raw(title, payload, id) {
  const top = element("h3", {}, title);
  if (payload === undefined) return element("section", { className: "card", id }, top, empty("It was not kept."));
  const text = typeof payload === "string" ? payload : JSON.stringify(payload, null, 2);
  const code = element("pre", { tabIndex: 0, ariaLabel: title }, text.slice(0, SHOWN));
  const rest = text.length > SHOWN ? button(`Show all ${count(text.length)} characters`, (event) => (code.replaceChildren(text), event.target.remove())) : null;
  top.append(copyButton(() => text, `Copy the ${title.toLowerCase()}`));
  return element("section", { className: "card payload", id }, top, code, rest);
}
