/** Live requests: polls the newest log records, and shows an alert when fallbacks answered requests. */

import { element } from "../dom.js";
import { link } from "./components.js";
import { records } from "./records.js";

const POLL_MS = 2000;
const MAX_RECORDS = 50; // loaded
const MAX_ROWS = 15; // shown
const BUSY_MS = 10_000; // the gateway counts as busy this long after a request

export function live(session, context) {
  const alert = element("div", { id: "fallback-alert", className: "alarm", role: "status", hidden: true });
  const rows = element("div", { id: "live" });
  const title = element("h3", {}, "Live requests ", element("small", {}, "newest first"));
  const node = element("section", { className: "card" }, title, rows);
  follow(session, context, alert, rows);
  return { node, alert };
}

async function follow(session, context, alert, rows) {
  let shown = null;
  while (!context.signal.aborted) {
    if (!document.hidden) {
      try {
        const { items, complete } = await session.api.get("logs", { gateway: session.gateway, limit: MAX_RECORDS }, context.signal);
        context.showState("ready", "live", Date.now() - Date.parse(items[0]?.created_at) < BUSY_MS);
        const key = items.map(({ id, feedback }) => id + feedback).join();
        if (key !== shown && (items.length || complete)) {
          rows.replaceChildren(records("Live requests", items.slice(0, MAX_ROWS)));
          warn(alert, items);
          shown = key;
        }
      } catch (error) {
        if (context.signal.aborted) return;
        if (error.status === 401) return context.signedOut(error);
        context.showState("offline", error.message);
      }
    }
    await new Promise((wake) => setTimeout(wake, POLL_MS));
  }
}

/** Show an alert if a fallback answered, because then an earlier step failed. */
function warn(alert, items) {
  const fallbacks = items.filter(({ step, success }) => step > 0 && success);
  alert.hidden = !fallbacks.length;
  if (!fallbacks.length) return;
  const models = [...new Set(fallbacks.map(({ provider, model }) => `${provider}/${model}`))].slice(0, 3).join(", ");
  const text = `A fallback answered ${fallbacks.length} of the last ${items.length} requests: ${models}. `;
  alert.replaceChildren(element("strong", {}, "Fallbacks in use. "), text, link("#/logs?rescued=true", "Show these requests"));
}
