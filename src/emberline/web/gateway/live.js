/** Live requests: the newest records of the log, looked at again and again; and an alarm when fallbacks have to answer. */

import { element } from "../dom.js";
import { link } from "./parts.js";
import { records } from "./records.js";

const PERIOD = 2000; // ms
const LOOKED = 50; // records
const SHOWN = 15;
const AT_WORK = 10_000; // ms since the last request

export function live(session, where) {
  const alert = element("div", { id: "rescued", className: "alarm", role: "status", hidden: true });
  const rows = element("div", { id: "live" });
  const title = element("h3", {}, "Live requests ", element("small", {}, "the newest"));
  const node = element("section", { className: "card" }, title, rows);
  follow(session, where, alert, rows);
  return { node, alert };
}

async function follow(session, where, alert, rows) {
  let shown = null;
  while (!where.signal.aborted) {
    if (!document.hidden) {
      try {
        const { items, complete } = await session.api.get("logs", { gateway: session.gateway, limit: LOOKED }, where.signal);
        where.live("ready", "live", Date.now() - Date.parse(items[0]?.created_at) < AT_WORK);
        const key = items.map(({ id, feedback }) => id + feedback).join();
        if (key !== shown && (items.length || complete)) {
          rows.replaceChildren(records("Live requests", items.slice(0, SHOWN)));
          warn(alert, items);
          shown = key;
        }
      } catch (error) {
        if (where.signal.aborted) return;
        if (error.status === 401) return where.expelled(error);
        where.live("offline", error.message);
      }
    }
    await new Promise((wake) => setTimeout(wake, PERIOD));
  }
}

/** A fallback that answers means that somebody in front of it could not. */
function warn(alert, items) {
  const rescued = items.filter(({ step, success }) => step > 0 && success);
  alert.hidden = !rescued.length;
  if (!rescued.length) return;
  const by = [...new Set(rescued.map(({ provider, model }) => `${provider}/${model}`))].slice(0, 3).join(", ");
  const text = `A fallback answered ${rescued.length} of the last ${items.length} requests: ${by}. `;
  alert.replaceChildren(element("strong", {}, "Served by a later step. "), text, link("#/logs?rescued=true", "See them"));
}
