/** The router's page: polls its status once a second and shows the last minute, a card for each worker, and counters. */

import { Chart, WINDOW } from "./chart.js";
import { element } from "./dom.js";
import { wireTheme } from "./theme.js";

const POLL_MS = 1000;
const KEY = "emberline-router-key"; // in the session storage
const $ = (id) => document.getElementById(id);

const whole = (value) => (value >= 10_000 ? `${(value / 1000).toFixed(0)}k` : value.toFixed(0));
const percent = (value) => `${(100 * value).toFixed(0)}%`;
const bytes = (value) => (value >= 1e9 ? `${(value / 1e9).toFixed(1)} GB` : value >= 1e6 ? `${(value / 1e6).toFixed(1)} MB` : `${(value / 1e3).toFixed(0)} kB`);
const sum = (workers, name) => workers.reduce((total, worker) => total + worker[name], 0);
const sumTransfer = (workers, name) => workers.reduce((total, worker) => total + (worker.transfer?.[name] ?? 0), 0);
const total = (counts) => Object.values(counts).reduce((all, count) => all + count, 0);
const ratio = (part, all) => (all > 0 ? part / all : null);

const COUNTS = [
  ["session", "by session header"],
  ["prefix", "by prefix cache"],
  ["yielded", "moved off a loaded worker"],
  ["away", "preferred worker unavailable"],
  ["load", "by load only"],
];

class Page {
  constructor() {
    this.samples = [];
    this.cards = new Map();
    const one = (title, format, value, tone, label, more = {}) => new Chart({ title, format, series: [{ label, tone, value }], ...more });
    this.charts = [
      one("Requests", whole, (s) => s.rate, "ok", "/s"),
      new Chart({
        title: "Tokens in flight",
        format: whole,
        series: [
          { label: "prompt", tone: "sky", value: (s) => s.prefill },
          { label: "decode", tone: "plum", value: (s) => s.decode },
        ],
      }),
      one("Generated", whole, (s) => s.generated, "plum", "tok/s"),
      one("Cache hits", percent, (s) => s.hits, "ok", "of prompts", { max: 1 }),
      one("KV transferred", bytes, (s) => s.moved, "sky", "/s"),
      one("Errors", whole, (s) => s.errors, "fail", "/s"),
    ];
    $("key-form").addEventListener("submit", (event) => this.useKey(event));
    $("charts").append(...this.charts.map((chart) => chart.node));
  }

  async run() {
    for (;;) {
      if (!document.hidden) await this.poll();
      await new Promise((wake) => setTimeout(wake, POLL_MS));
    }
  }

  async poll() {
    let status = null;
    this.isLocked = false;
    try {
      const key = sessionStorage.getItem(KEY); // a secret: kept only until the tab is closed
      const reply = await fetch("cluster/status", { headers: key ? { Authorization: `Bearer ${key}` } : {} });
      if (reply.ok) status = await reply.json();
      this.showKeyForm(reply.status === 401, Boolean(key));
    } catch {
      // shown as offline below
    }
    const now = performance.now();
    this.samples = this.samples.filter(({ time }) => time > now - WINDOW);
    this.samples.push({ time: now, ...(status && this.measure(status, now)) });
    for (const chart of this.charts) chart.draw(this.samples, now);
    this.show(status);
  }

  /** Show the form for the key while the router asks for one. `isWrong`: it does not accept the key of the form. */
  showKeyForm(isShown, isWrong) {
    this.isLocked = isShown;
    $("key-form").hidden = !isShown;
    $("key-error").hidden = !isWrong;
  }

  useKey(event) {
    event.preventDefault();
    sessionStorage.setItem(KEY, $("key-form").key.value.trim());
    this.poll();
  }

  /** Return gauges, and rates from differences of counters: null if unknown, and never negative after a restart of a
      worker, whose counters begin at zero. */
  measure({ workers, refused, broken }, now) {
    const counters = {
      answered: sum(workers, "answered"),
      tokens: sum(workers, "generated_tokens"),
      failures: sum(workers, "failed") + refused + broken,
      queries: sum(workers, "prefix_queries"),
      found: sum(workers, "prefix_hits"),
      pulled: sumTransfer(workers, "pulled_bytes"),
    };
    const measured = this.samples.filter((s) => s.answered !== undefined);
    const last = measured.at(-1);
    const rate = (name) => (last ? Math.max(0, (1000 * (counters[name] - last[name])) / (now - last.time)) : null);
    const first = measured[0];
    const hits = first ? ratio(counters.found - first.found, counters.queries - first.queries) : null;
    return {
      ...counters,
      rate: rate("answered"),
      generated: rate("tokens"),
      errors: rate("failures"),
      moved: rate("pulled"),
      hits: hits === null ? null : Math.min(1, Math.max(0, hits)),
      prefill: sum(workers, "prefill_tokens"),
      decode: sum(workers, "decode_tokens"),
    };
  }

  show(status) {
    const ready = status ? status.workers.filter((worker) => worker.health === "ready").length : 0;
    $("state").dataset.state = !status ? "offline" : ready ? "ready" : "waiting";
    $("state").textContent = this.isLocked ? "locked" : !status ? "the router does not respond" : `${ready} of ${status.workers.length} ready`;
    document.documentElement.dataset.busy = String(Boolean(status?.open_requests));
    document.documentElement.style.setProperty("--heat", status?.open_requests ? 1 : 0);
    if (!status) return;
    $("facts").textContent = `${status.open_requests} requests open`;
    $("empty").hidden = status.workers.length > 0;
    this.showWorkers(status.workers);
    this.showCounts(status);
  }

  showCounts({ decisions, retries, prefills, migrations, refused, broken }) {
    const counts = COUNTS.map(([name, label]) => fact(label, decisions[name] ?? 0));
    counts.push(fact("retried on another worker", total(retries)), fact("rejected, workers full", refused), fact("streams broken", broken, broken > 0));
    $("counts").replaceChildren(...counts.flat());
    const failed = Object.keys(prefills).filter((how) => !["done", "left", "no ticket"].includes(how));
    const failures = failed.reduce((all, how) => all + prefills[how], 0);
    const by = (outcome) => migrations.filter((m) => m.outcome === outcome);
    const number = (those) => those.reduce((all, m) => all + m.count, 0);
    const facts = [
      fact("prompts split", decisions.split ?? 0),
      fact("prefilled", prefills.done ?? 0),
      fact("prefills failed", failures, failures > 0),
      fact("streams moved", number(by("went on"))),
      fact("migrations failed", number(by("given up")), by("given up").length > 0),
      ...by("went on").map((m) => fact(`moved: ${m.reason}`, m.count)),
    ];
    $("moves").replaceChildren(...facts.flat());
  }

  showWorkers(workers) {
    const names = new Set(workers.map(({ name }) => name));
    for (const [name, card] of this.cards) {
      if (!names.has(name)) card.node.remove(), this.cards.delete(name);
    }
    for (const worker of workers) {
      if (!this.cards.has(worker.name)) {
        this.cards.set(worker.name, new Card());
        $("workers").append(this.cards.get(worker.name).node);
      }
      this.cards.get(worker.name).show(worker);
    }
  }
}

class Card {
  constructor() {
    this.name = element("h3");
    this.role = element("span", { className: "role" });
    this.health = element("span", { className: "health" });
    this.models = element("p", { className: "models" });
    this.level = element("i");
    this.facts = element("dl");
    const head = element("header", {}, this.name, this.role, this.health);
    this.node = element("li", { className: "worker" }, head, this.models, element("div", { className: "fill" }, this.level), this.facts);
  }

  show(worker) {
    this.node.dataset.name = worker.name;
    this.node.dataset.health = worker.health;
    this.node.dataset.role = worker.role;
    this.name.textContent = worker.name;
    this.role.textContent = worker.role === "both" ? "" : worker.role;
    this.health.textContent = worker.breaker === "closed" ? worker.health : `${worker.health}, breaker ${worker.breaker}`;
    this.models.textContent = worker.models.join(", ");
    this.level.style.width = percent(Math.min(1, worker.open / worker.max_running));
    const hits = ratio(worker.prefix_hits, worker.prefix_queries);
    this.facts.replaceChildren(
      ...[
        fact("requests", `${worker.open} of ${worker.max_running}`),
        fact("prompt tokens", whole(worker.prefill_tokens)),
        fact("decode tokens", whole(worker.decode_tokens)),
        fact("KV cache used", percent(worker.kv_usage)),
        fact("prefix cache hits", hits === null ? "–" : percent(hits)),
        fact("answered", worker.answered),
        fact(worker.failed ? "✕ failed" : "failed", worker.failed, worker.failed > 0),
        ...this.transferFacts(worker),
        fact("last heartbeat", `${worker.seconds_since_beat.toFixed(1)} s ago`, worker.health === "lost"),
      ].flat(),
    );
  }

  /** Return the facts about KV transfers with other workers and about migrations. */
  transferFacts({ paired, refused, transfer, moved }) {
    const facts = [];
    if (paired.length) facts.push(fact("KV from", paired.join(", ")));
    for (const [name, why] of Object.entries(refused)) facts.push(fact(`no KV from ${name}`, why, true));
    if (transfer?.pulls) facts.push(fact("KV received", `${bytes(transfer.pulled_bytes)} at ${bytes(transfer.pulled_bytes / (transfer.copy_seconds || 1))}/s`));
    if (transfer?.recomputed) facts.push(fact("prefixes recomputed", transfer.recomputed, true));
    if (transfer?.published) facts.push(fact("KV published", transfer.published), fact("pinned for others", `${transfer.pinned_blocks} blocks`));
    if (moved) facts.push(fact("requests moved away", moved));
    return facts;
  }
}

const fact = (label, value, bad = false) =>
  element("div", {}, element("dt", {}, label), element("dd", { className: bad ? "bad" : "" }, String(value)));

wireTheme($("theme"));
new Page().run();
