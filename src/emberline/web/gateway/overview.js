/** The overview: how much, how fast, how dear, over a stretch of time. Read from rollups: a month costs no more than an hour. */

import { element } from "../dom.js";
import { NONE, count, millis, money, percent, ratio } from "./figures.js";
import { live } from "./live.js";
import { head, link, table } from "./parts.js";
import { TimeChart } from "./timechart.js";

const MINUTE = 60_000;
const UNITS = { minute: MINUTE, hour: 60 * MINUTE, day: 1440 * MINUTE };
/** name -> how many cells of which unit */
const RANGES = { "1h": [60, "minute"], "6h": [360, "minute"], "24h": [24, "hour"], "7d": [168, "hour"], "30d": [30, "day"] };
const PERIOD = 10_000; // ms between two looks
const MOST_ROWS = 50; // of a dimension: those that cost most
/** dimension -> [what it is called, the smallest unit it is kept by, the filter of the log] */
const DIMENSIONS = {
  model: ["Models", "minute", null],
  provider: ["Providers", "minute", "provider"],
  key: ["Keys", "hour", "key_id"],
  user: ["Users", "day", "user"],
  status: ["Statuses", "hour", "status"],
  error: ["Errors", "hour", "error"],
};

const OTHERS = "\u2026"; // all users but those that cost most
const fine = ({ requests, errors, cached, rescued }) => Math.max(0, requests - errors - cached - rescued);
const rate = (name) => (cell) => ratio(cell[name], cell.requests);
const one = (title, format, label, tone, value, more = {}) => new TimeChart({ title, format, series: [{ label, tone, value }], ...more });

export async function overview(session, where) {
  const page = new Overview(session, where);
  await page.look();
  page.follow();
  return page.node;
}

class Overview {
  constructor(session, where) {
    Object.assign(this, { session, where });
    this.range = RANGES[where.query.get("range")] ? where.query.get("range") : "24h";
    this.dimension = DIMENSIONS[where.query.get("by")] ? where.query.get("by") : "model";
    this.charts = charts();
    this.tabled = element("div", { id: "breakdown" });
    this.coarse = element("span", { className: "coarse" });
    this.live = live(session, where);
    const ranges = Object.keys(RANGES).map((name) => this.choice({ range: name, by: this.dimension }, name, name === this.range));
    const kinds = Object.entries(DIMENSIONS).map(([name, [title]]) => this.choice({ range: this.range, by: name }, title, name === this.dimension));
    this.node = element(
      "div",
      { className: "overview" },
      head("Overview", "", element("nav", { className: "tabs", ariaLabel: "Time" }, ...ranges)),
      this.live.alert,
      element("div", { className: "timecharts", id: "charts" }, ...Object.values(this.charts).map(({ node }) => node)),
      element("section", { className: "card" }, this.coarse, element("nav", { className: "tabs", ariaLabel: "Broken down by" }, ...kinds), this.tabled),
      this.live.node,
    );
  }

  choice(to, text, current) {
    const node = link(`#/overview?${new URLSearchParams(to)}`, text);
    node.ariaCurrent = current ? "true" : null;
    return node;
  }

  async follow() {
    const { signal } = this.where;
    while (!signal.aborted) {
      await new Promise((wake) => setTimeout(wake, PERIOD));
      if (document.hidden || signal.aborted) continue;
      await this.look().catch(() => {}); // the live list says that the gateway does not answer
    }
  }

  async look() {
    const [cells, unit] = RANGES[this.range];
    const size = UNITS[unit];
    const last = Math.floor(Date.now() / size) * size;
    const times = { since: last - (cells - 1) * size, until: last + size };
    const [, smallest] = DIMENSIONS[this.dimension];
    const coarse = UNITS[smallest] > size ? smallest : unit;
    const ask = (query) => this.session.api.get("rollups", { gateway: this.session.gateway, ...times, ...query }, this.where.signal);
    const [over, whole, apart] = await Promise.all([
      ask({ unit, over_time: true }),
      ask({ unit, over_time: false }),
      ask({ unit: coarse, dimension: this.dimension, over_time: false, limit: MOST_ROWS }),
    ]);
    this.draw(filled(over.items, times, size), unit, whole.items[0] ?? ZERO);
    this.coarse.textContent = coarse === unit ? "" : `by whole ${coarse}s`;
    this.tabled.replaceChildren(this.breakdown(apart.items));
  }

  draw(cells, unit, all) {
    const { requests, cost, tokens, latency, cache, errors } = this.charts;
    const unpriced = all.unpriced ? `${count(all.unpriced)} without a price` : "";
    requests.draw(cells, unit, count(all.requests), all.rescued ? `${count(all.rescued)} rescued by a fallback` : "");
    cost.draw(cells, unit, money(all.micros), unpriced);
    tokens.draw(cells, unit, count(all.tokens_in + all.tokens_out), `${count(all.tokens_in)} in, ${count(all.tokens_out)} out`);
    latency.draw(cells, unit, millis(all.duration_p50), `p99 ${millis(all.duration_p99)}, first content ${millis(all.first_byte_p50)}`);
    cache.draw(cells, unit, percent(ratio(all.cached, all.requests)), `${count(all.cached)} from the cache`);
    errors.draw(cells, unit, percent(ratio(all.errors, all.requests)), `${count(all.errors)} failed`);
  }

  breakdown(items) {
    const [title, , filter] = DIMENSIONS[this.dimension];
    const most = Math.max(1, ...items.map(({ requests }) => requests));
    const bar = ({ requests }) => {
      const node = element("span", { className: "share" });
      node.style.setProperty("--share", requests / most);
      return element("span", { className: "amount" }, element("span", {}, count(requests)), node);
    };
    const name = ({ value }) => (value === OTHERS ? "all others" : value ? link(`#/logs?${asked(this.dimension, filter, value)}`, value) : NONE);
    const timed = items.some((item) => "duration_p50" in item);
    const columns = [
      [title.slice(0, -1), name, "wide"],
      ["Requests", bar, "number"],
      ["Errors", (c) => percent(ratio(c.errors, c.requests)), "number"],
      ["Cached", (c) => percent(ratio(c.cached, c.requests)), "number"],
      ["Rescued", (c) => percent(ratio(c.rescued, c.requests)), "number"],
      ["Tokens", (c) => count(c.tokens_in + c.tokens_out), "number"],
      ["Cost", cost, "number"],
      ...(timed ? [["p50", (c) => millis(c.duration_p50), "number"], ["p99", (c) => millis(c.duration_p99), "number"]] : []),
    ];
    const none = this.dimension === "error" ? "Nothing has failed." : "No requests in this time.";
    const order = (a, b) => (a.value === OTHERS) - (b.value === OTHERS) || b.requests - a.requests;
    return table(title, columns, items.map((item) => ({ ...item, id: item.value })).sort(order), { none });
  }
}

/** Of those whose price is known: there may be more. */
const cost = ({ micros, unpriced, requests }) => (unpriced === requests ? NONE : `${unpriced ? "≥ " : ""}${money(micros)}`);

/** A model's cell is named provider/model. */
function asked(dimension, filter, value) {
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
        { label: "answered", tone: "ember", value: fine },
        { label: "cached", tone: "sage", value: (c) => c.cached },
        { label: "rescued", tone: "sand", value: (c) => c.rescued },
        { label: "failed", tone: "fail", value: (c) => c.errors },
      ],
    }),
    cost: one("Cost", money, "cost", "sand", (c) => c.micros, { bars: true }),
    tokens: new TimeChart({
      title: "Tokens",
      format: count,
      bars: true,
      series: [
        { label: "in", tone: "sky", value: (c) => c.tokens_in },
        { label: "out", tone: "ember", value: (c) => c.tokens_out },
      ],
    }),
    latency: new TimeChart({
      title: "Latency",
      format: millis,
      series: ["p50", "p90", "p99"].map((name, i) => ({ label: name, tone: ["sky", "sand", "ember"][i], value: (c) => c[`duration_${name}`] ?? null })),
    }),
    cache: one("Cache hits", percent, "of requests", "sage", rate("cached"), { max: 1 }),
    errors: one("Errors", percent, "of requests", "fail", rate("errors")),
  };
}

const ZERO = { requests: 0, errors: 0, cached: 0, rescued: 0, unpriced: 0, micros: 0, tokens_in: 0, tokens_out: 0 };

/** A cell for each unit: where there was nothing there is none. */
function filled(items, { since, until }, size) {
  const known = new Map(items.map((item) => [item.start, item]));
  return Array.from({ length: (until - since) / size }, (_, i) => known.get(since + i * size) ?? { ...ZERO, start: since + i * size });
}
