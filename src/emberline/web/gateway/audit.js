/** Changes: who changed what through the management API, newest first. */

import { element } from "../dom.js";
import { exactly } from "./figures.js";
import { button, head, table } from "./parts.js";

const PAGE = 50;

export async function audit(session, where) {
  const rows = element("section", { className: "card", id: "changes" });
  const foot = element("div", { className: "pager" });
  const items = [];
  const more = async (before) => {
    const page = await session.api.get("audit", { before, limit: PAGE }, where.signal);
    items.push(...page.items);
    rows.replaceChildren(table("Changes", COLUMNS, items, { none: "Nothing was changed yet." }));
    const older = button("Older", () => more(page.next));
    foot.replaceChildren(...(page.next ? [older] : []));
  };
  await more("");
  return element("div", {}, head("Changes", "Every change that was made through the management API. Secrets are not in it."), rows, foot);
}

const COLUMNS = [
  ["Time", ({ at }) => exactly(at), "number"],
  ["Who", ({ actor }) => actor],
  ["What", ({ action }) => element("b", {}, action)],
  ["To what", ({ target }) => target, "wide"],
  ["", detail],
];

function detail({ before, after }) {
  const text = [["before", before], ["after", after]].filter(([, value]) => value !== null).map(([name, value]) => `${name}: ${JSON.stringify(value, null, 2)}`);
  return element("details", {}, element("summary", {}, "details"), element("pre", {}, text.join("\n")));
}
