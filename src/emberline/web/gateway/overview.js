/** The overview: requests, cost, tokens and latency over time, read from rollups, so that a month loads as fast as an hour. */

import { element } from "../dom.js";
import { LOCAL_COST, NONE, count, isLocal, millis, money, percent, ratio } from "./format.js";
import { live } from "./live.js";
import { head, link, table } from "./components.js";
import { TimeChart } from "./timechart.js";

const MINUTE = 60_000;
const UNITS = { minute: MINUTE, hour: 60 * MINUTE, day: 1440 * MINUTE };
/** name -> [number of cells, unit] */
const RANGES = { "1h": [60, "minute"], "6h": [360, "minute"], "24h": [24, "hour"], "7d": [168, "hour"], "30d": [30, "day"] };
const POLL_MS = 10_000;
const MAX_ROWS = 50; // of a breakdown, the most expensive first
/** dimension -> [title, smallest unit of its rollups, filter of the log explorer] */
const DIMENSIONS = {
  model: ["Models", "minute", null],
  provider: ["Providers", "minute", "provider"],
  key: ["Keys", "hour", "key_id"],
  user: ["Users", "day", "user"],
  status: ["Statuses", "hour", "status"],
  error: ["Errors", "hour", "error"],
};

const OTHERS = "\u2026"; // all users except the most expensive
const plainAnswers = ({ requests, errors, cached, rescued }) => Math.max(0, requests - errors - cached - rescued);
const rate = (name) => (cell) => ratio(cell[name], cell.requests);
const one = (title, format, label, tone, value, more = {}) => new TimeChart({ title, format, series: [{ label, tone, value }], ...more });

export async function overview(session, context) {
  const page = new Overview(session, context);
  await page.load();
  page.follow();
  return page.node;
}

class Overview {
  constructor(session, context) {
    Object.assign(this, { session, context });
    this.range = RANGES[context.query.get("range")] ? context.query.get("range") : "24h";
    this.dimension = DIMENSIONS[context.query.get("by")] ? context.query.get("by") : "model";
    this.charts = charts();
    this.breakdownNode = element("div", { id: "breakdown" });
    this.coarse = element("span", { className: "coarse" });
    this.live = live(session, context);
    const ranges = Object.keys(RANGES).map((name) => this.choice({ range: name, by: this.dimension }, name, name === this.range));
    const kinds = Object.entries(DIMENSIONS).map(([name, [title]]) => this.choice({ range: this.range, by: name }, title, name === this.dimension));
    this.node = element(
      "div",
      { className: "overview" },
      head("Overview", "", element("nav", { className: "tabs", ariaLabel: "Time" }, ...ranges)),
      this.live.alert,
      element("div", { className: "timecharts", id: "charts" }, ...Object.values(this.charts).map(({ node }) => node)),
      element("section", { className: "card" }, this.coarse, element("nav", { className: "tabs", ariaLabel: "Break down by" }, ...kinds), this.breakdownNode),
      this.live.node,
    );
  }

  choice(to, text, current) {
    const node = link(`#/overview?${new URLSearchParams(to)}`, text);
    node.ariaCurrent = current ? "true" : null;
    return node;
  }

  async follow() {
    const { signal } = this.context;
    while (!signal.aborted) {
      await new Promise((wake) => setTimeout(wake, POLL_MS));
      if (document.hidden || signal.aborted) continue;
      await this.load().catch(() => {}); // the live list shows that the gateway does not respond
    }
  }

  async load() {
    const [cells, unit] = RANGES[this.range];
    const size = UNITS[unit];
    const last = Math.floor(Date.now() / size) * size;
    const times = { since: last - (cells - 1) * size, until: last + size };
    const [, smallest] = DIMENSIONS[this.dimension];
    const coarse = UNITS[smallest] > size ? smallest : unit;
    const rollups = (query) => this.session.api.get("rollups", { gateway: this.session.gateway, ...times, ...query }, this.context.signal);
    const [series, totals, groups] = await Promise.all([
      rollups({ unit, over_time: true }),
      rollups({ unit, over_time: false }),
      rollups({ unit: coarse, dimension: this.dimension, over_time: false, limit: MAX_ROWS }),
    ]);
    this.draw(fillGaps(series.items, times, size), unit, totals.items[0] ?? ZERO);
    this.coarse.textContent = coarse === unit ? "" : `in whole ${coarse}s`;
    this.breakdownNode.replaceChildren(this.breakdown(groups.items));
  }

  draw(cells, unit, all) {
    const { requests, cost, tokens, latency, cache, errors } = this.charts;
    const unpriced = all.unpriced ? `${count(all.unpriced)} without a price` : "";
    requests.draw(cells, unit, count(all.requests), all.rescued ? `${count(all.rescued)} answered by a fallback` : "");
    cost.draw(cells, unit, money(all.micros), unpriced);
    tokens.draw(cells, unit, count(all.tokens_in + all.tokens_out), `${count(all.tokens_in)} in, ${count(all.tokens_out)} out`);
    latency.draw(cells, unit, millis(all.duration_p50), `p99 ${millis(all.duration_p99)}, first content ${millis(all.first_byte_p50)}`);
    cache.draw(cells, unit, percent(ratio(all.cached, all.requests)), `${count(all.cached)} from the cache`);
    errors.draw(cells, unit, percent(ratio(all.errors, all.requests)), `${count(all.errors)} failed`);
  }

  breakdown(items) {
    const [title, , filter] = DIMENSIONS[this.dimension];
    const maxRequests = Math.max(1, ...items.map(({ requests }) => requests));
    const bar = ({ requests }) => {
      const node = element("span", { className: "share" });
      node.style.setProperty("--share", requests / maxRequests);
      return element("span", { className: "amount" }, element("span", {}, count(requests)), node);
    };
    const name = ({ value }) => (value === OTHERS ? "all others" : value ? link(`#/logs?${logFilter(this.dimension, filter, value)}`, value) : NONE);
    const hasLatency = items.some((item) => "duration_p50" in item);
    const columns = [
      [title.slice(0, -1), name, "wide"],
      ["Requests", bar, "number"],
      ["Errors", (c) => percent(ratio(c.errors, c.requests)), "number"],
      ["Cached", (c) => percent(ratio(c.cached, c.requests)), "number"],
      ["Fallback", (c) => percent(ratio(c.rescued, c.requests)), "number"],
      ["Tokens", (c) => count(c.tokens_in + c.tokens_out), "number"],
      ["Cost", cost, "number"],
      ...(hasLatency ? [["p50", (c) => millis(c.duration_p50), "number"], ["p99", (c) => millis(c.duration_p99), "number"]] : []),
    ];
    const none = this.dimension === "error" ? "No errors in this period." : "No requests in this period.";
    const order = (a, b) => (a.value === OTHERS) - (b.value === OTHERS) || b.requests - a.requests;
    return table(title, columns, items.map((item) => ({ ...item, id: item.value })).sort(order), { none });
  }
}

/** The cost of the requests whose price is known; "≥" if others have no price. `value`: PROVIDER or PROVIDER/MODEL. */
function cost({ value, micros, unpriced }) {
  const [provider] = String(value ?? "").split("/");
  if (isLocal(provider) && !micros) return LOCAL_COST;
  if (!unpriced) return money(micros);
  return micros ? `≥ ${money(micros)}` : NONE;
}

/** Return the query of the log explorer for a value of a dimension; models are named provider/model. */
function logFilter(dimension, filter, value) {
  if (dimension !== "model") return new URLSearchParams({ [filter]: value });
  const [provider, ...model] = value.split("/");
  return new URLSearchParams({ provider, model: model.join("/") });
}

function charts() {
  return {
    requests: new TimeChart({
      title: "Requests",
      format: count,
      bars: true,
      series: [
        { label: "answered", tone: "ok", value: plainAnswers },
        { label: "cached", tone: "cached", value: (c) => c.cached },
        { label: "fallback", tone: "fallback", value: (c) => c.rescued },
        { label: "failed", tone: "fail", value: (c) => c.errors },
      ],
    }),
    cost: one("Cost", money, "cost", "plum", (c) => c.micros, { bars: true }),
    tokens: new TimeChart({
      title: "Tokens",
      format: count,
      bars: true,
      series: [
        { label: "in", tone: "sky", value: (c) => c.tokens_in },
        { label: "out", tone: "plum", value: (c) => c.tokens_out },
      ],
    }),
    latency: new TimeChart({
      title: "Latency",
      format: millis,
      series: ["p50", "p90", "p99"].map((name, i) => ({ label: name, tone: ["sky", "sand", "plum"][i], value: (c) => c[`duration_${name}`] ?? null })),
    }),
    cache: one("Cache hits", percent, "of requests", "sky", rate("cached"), { max: 1 }),
    errors: one("Errors", percent, "of requests", "fail", rate("errors")),
  };
}

const ZERO = { requests: 0, errors: 0, cached: 0, rescued: 0, unpriced: 0, micros: 0, tokens_in: 0, tokens_out: 0 };

/** Return a cell for each unit of time, with zeros if there is no rollup. */
function fillGaps(items, { since, until }, size) {
  const cells = new Map(items.map((item) => [item.start, item]));
  return Array.from({ length: (until - since) / size }, (_, i) => cells.get(since + i * size) ?? { ...ZERO, start: since + i * size });
}
