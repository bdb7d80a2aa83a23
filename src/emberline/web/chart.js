/** Chart: a few series over the last minute, as SVG. Colours come from the style sheet, so a theme change needs no redraw. */

import { element, svg } from "./dom.js";

export const WINDOW = 60_000; // ms shown
const WIDTH = 120;
const HEIGHT = 40;

export class Chart {
  /** `series`: [{ label, tone, value(sample) -> number or null }]; `format` returns a value's text; `max` fixes the scale. */
  constructor({ title, series, format, max = null, big = false }) {
    Object.assign(this, { title, series, format, max });
    this.samples = [];
    this.hover = null;
    this.readings = series.map(({ label, tone }) => {
      const reading = element("b", { className: "reading" }, "–");
      return { reading, node: element("span", { className: `series ${tone}` }, reading, label ? ` ${label}` : null) };
    });
    this.lines = series.map(({ tone }) => svg("path", { class: `line ${tone}` }));
    this.areas = series.map(({ tone }) => svg("path", { class: `area ${tone}` }));
    this.cursor = svg("path", { class: "cursor" });
    this.top = element("span", { className: "top" });
    const frame = { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" };
    this.plot = svg("svg", frame, ...this.areas, ...this.lines, this.cursor);
    const legend = element("span", { className: "legend" }, ...this.readings.map(({ node }) => node));
    const caption = element("figcaption", {}, element("span", {}, title, this.top), legend);
    this.node = element("figure", { className: big ? "chart big" : "chart" }, caption, this.plot);
    this.plot.addEventListener("pointermove", (event) => this.point(event));
    this.plot.addEventListener("pointerleave", () => this.point(null));
  }

  draw(samples, now) {
    this.samples = samples;
    this.now = now;
    const highest = Math.max(0, ...this.series.flatMap(({ value }) => samples.map(value)).filter(Number.isFinite));
    const scale = this.max ?? ceiling(highest);
    const x = (sample) => (WIDTH * (sample.time - now + WINDOW)) / WINDOW;
    this.series.forEach(({ value }, i) => {
      const y = (sample) => HEIGHT - (HEIGHT - 2) * Math.min(1, value(sample) / scale);
      const runs = split(samples, value).map((run) => run.map((sample) => [x(sample).toFixed(2), y(sample).toFixed(2)]));
      this.lines[i].setAttribute("d", runs.map(path).join(""));
      this.areas[i].setAttribute("d", runs.map((run) => `${path(run)}V${HEIGHT}H${run[0][0]}Z`).join(""));
    });
    this.top.textContent = this.max ? "" : `0–${this.format(scale)}`;
    this.read();
  }

  point(event) {
    this.hover = event && (event.offsetX / this.plot.clientWidth) * WINDOW - WINDOW;
    if (this.samples.length) this.read();
  }

  /** Show the values under the pointer, or the latest ones. */
  read() {
    const time = this.now + (this.hover ?? 0);
    const distance = (sample) => Math.abs(sample.time - time);
    const nearest = this.samples.reduce((best, sample) => (distance(sample) < distance(best) ? sample : best));
    const texts = this.series.map(({ value }) => (Number.isFinite(value(nearest)) ? this.format(value(nearest)) : "–"));
    texts.forEach((text, i) => (this.readings[i].reading.textContent = text));
    const ariaText = texts.map((text, i) => `${text} ${this.series[i].label}`).join(", ");
    this.plot.setAttribute("aria-label", `${this.title}: ${ariaText}`);
    const at = (WIDTH * (WINDOW + (this.hover ?? 0))) / WINDOW;
    this.cursor.setAttribute("d", this.hover === null ? "" : `M${at} 0V${HEIGHT}`);
  }
}

const path = (run) => `M${run.map((point) => point.join(" ")).join("L")}`;

/** Return the runs of samples that have a value; a missing value is a gap in the line. */
function split(samples, value) {
  const runs = [[]];
  for (const sample of samples) {
    if (Number.isFinite(value(sample))) runs.at(-1).push(sample);
    else if (runs.at(-1).length) runs.push([]);
  }
  return runs.filter((run) => run.length);
}

/** Round up to 1, 2 or 5 times a power of ten, so that the scale rarely changes. */
function ceiling(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value);
}
