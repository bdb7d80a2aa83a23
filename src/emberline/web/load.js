/** Load: reads the server's counters twice a second and draws charts of the last minute. */

import { Chart, WINDOW } from "./chart.js";
import { stats } from "./wire.js";

const POLL_MS = 500;
const SMOOTHING_MS = 1600; // the interval over which rates are computed

const whole = (value) => (value >= 10_000 ? `${(value / 1000).toFixed(0)}k` : value.toFixed(0));
const percent = (value) => `${(100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0)}%`;
const share = (name) => (sample) => (sample.blocks_total ? sample[name] / sample.blocks_total : null);

export class Load {
  /** `onstate(stats or null, detail)` is called after every poll; null means that the server did not answer. */
  constructor(root, facts, key, onstate) {
    Object.assign(this, { facts, key, onstate });
    this.samples = [];
    this.charts = [
      new Chart({ title: "Generated", format: whole, big: true, series: [{ label: "tok/s", tone: "plum", value: (s) => s.generated }] }),
      new Chart({ title: "Prompt", format: whole, series: [{ label: "tok/s", tone: "sky", value: (s) => s.prompt }] }),
      new Chart({
        title: "Requests",
        format: whole,
        series: [
          { label: "running", tone: "ok", value: (s) => s.running },
          { label: "waiting", tone: "sand", value: (s) => s.waiting },
        ],
      }),
      new Chart({
        title: "KV cache",
        format: percent,
        max: 1,
        series: [
          { label: "used", tone: "plum", value: (s) => s.kv_usage },
          { label: "cached", tone: "sky", value: share("blocks_cached") },
        ],
      }),
      new Chart({ title: "Prefix hits", format: percent, max: 1, series: [{ label: "of prompts", tone: "sky", value: (s) => s.hitRate }] }),
    ];
    root.append(...this.charts.map((chart) => chart.node));
  }

  async run() {
    for (;;) {
      const started = performance.now();
      if (!document.hidden) await this.poll();
      await new Promise((wake) => setTimeout(wake, Math.max(50, POLL_MS - (performance.now() - started))));
    }
  }

  async poll() {
    let sample;
    try {
      sample = await stats(this.key());
    } catch (error) {
      this.onstate(null, error);
    }
    const now = performance.now();
    this.samples = this.samples.filter(({ time }) => time > now - WINDOW);
    this.samples.push({ ...sample, ...this.derive(sample, now), time: now });
    for (const chart of this.charts) chart.draw(this.samples, now);
    if (!sample) return;
    this.onstate(sample, this.samples.at(-1));
    this.facts.textContent = describe(sample);
  }

  /** Return rates from differences of counters; null if unknown (first sample, gap, engine restart). */
  derive(sample, now) {
    if (!sample) return {};
    const comparable = this.samples.filter((s) => s.step !== undefined && s.engine_restarts === sample.engine_restarts && s.step <= sample.step);
    const recent = comparable.find((s) => s.time > now - SMOOTHING_MS);
    const rate = (name) => (recent ? (1000 * (sample[name] - recent[name])) / (now - recent.time) : null);
    const queries = comparable.length ? sample.prefix_queries - comparable[0].prefix_queries : 0;
    return {
      generated: rate("generated_tokens"),
      prompt: rate("prompt_tokens"),
      hitRate: queries > 0 ? (sample.prefix_hits - comparable[0].prefix_hits) / queries : null,
    };
  }
}

function describe(sample) {
  const parts = [`up ${uptime(sample.uptime_seconds)}`, `${sample.blocks_total} blocks, ${sample.blocks_free} free`];
  if (sample.preemptions) parts.push(`${sample.preemptions} preemptions`);
  if (sample.engine_restarts) parts.push(`${sample.engine_restarts} engine restart${sample.engine_restarts > 1 ? "s" : ""}`);
  return parts.join(" · ");
}

function uptime(seconds) {
  const minutes = Math.floor(seconds / 60);
  if (minutes < 1) return `${Math.floor(seconds)} s`;
  return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}
