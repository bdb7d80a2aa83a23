/** Changes: the audit log of the management API, newest first. */

import { element } from "../dom.js";
import { formatDateTime } from "./format.js";
import { button, head, table } from "./components.js";

const PAGE = 50;

export async function audit(session, context) {
  const rows = element("section", { className: "card", id: "changes" });
  const foot = element("div", { className: "pager" });
  const items = [];
  const more = async (before) => {
    const page = await session.api.get("audit", { before, limit: PAGE }, context.signal);
    items.push(...page.items);
    rows.replaceChildren(table("Changes", COLUMNS, items, { none: "No changes yet." }));
    const older = button("Older", () => more(page.next));
    foot.replaceChildren(...(page.next ? [older] : []));
  };
  await more("");
  return element("div", {}, head("Changes", "Every change made through the management API. Secrets are not recorded."), rows, foot);
}

const COLUMNS = [
  ["Time", ({ at }) => formatDateTime(at), "number"],
  ["Key", ({ actor }) => actor],
  ["Action", ({ action }) => element("b", {}, action)],
  ["Target", ({ target }) => target, "wide"],
  ["", detail],
];

function detail({ before, after }) {
  const text = [["before", before], ["after", after]].filter(([, value]) => value !== null).map(([name, value]) => `${name}: ${JSON.stringify(value, null, 2)}`);
  return element("details", {}, element("summary", {}, "details"), element("pre", {}, text.join("\n")));
}
