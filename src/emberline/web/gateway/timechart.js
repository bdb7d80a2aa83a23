/** TimeChart: bars or lines over time, as SVG, with the values under the pointer (or selected by arrow keys) as text.
    Colours come from the style sheet, so a theme change needs no redraw. */

import { element, svg } from "../dom.js";
import { NONE, formatCellStart, formatTick } from "./format.js";

const WIDTH = 600;
const HEIGHT = 120;
const TOP = 4; // space above the highest value

export class TimeChart {
  /** `series`: [{ label, tone, value(cell) -> number or null }]; bars are stacked in their order, lines are not. */
  constructor({ title, series, format, bars = false, max = null }) {
    Object.assign(this, { title, series, format, bars, max, cells: [], at: null });
    this.total = element("b", { className: "total" }, NONE);
    this.about = element("span", { className: "about" });
    this.values = series.map(({ label, tone }) => ({ label, value: element("b", {}), node: element("span", { className: `key ${tone}` }, label) }));
    this.paths = series.map(({ tone }) => svg("path", { class: `${bars ? "column" : "line"} ${tone}` }));
    // A pattern as well as a colour. In a style sheet, the reference would be to a part of the style sheet.
    series.forEach(({ tone }, i) => bars && tone === "fail" && (this.paths[i].style.fill = "url(#failed-pattern)"));
    this.cursor = svg("path", { class: "cursor" });
    const frame = { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", tabindex: "0" };
    this.plot = svg("svg", frame, svg("path", { class: "grid", d: `M0 ${HEIGHT / 2}H${WIDTH}` }), ...this.paths, this.cursor);
    this.top = element("span", { className: "scale" });
    this.timeLabel = element("span", { className: "time-label" });
    this.ends = [element("span"), element("span"), element("span")];
    this.node = element(
      "figure",
      { className: "timechart" },
      element("figcaption", {}, element("span", { className: "name" }, title), this.total, this.about),
      element("div", { className: "plot" }, this.plot, this.top),
      element("div", { className: "axis" }, ...this.ends),
      element("div", { className: "legend" }, ...this.values.map(({ node, value }) => (node.append(" ", value), node)), this.timeLabel),
    );
    this.plot.addEventListener("pointermove", (event) => this.point(Math.floor((event.offsetX / this.plot.clientWidth) * this.cells.length)));
    this.plot.addEventListener("pointerleave", () => this.point(null));
    this.plot.addEventListener("blur", () => this.point(null));
    this.plot.addEventListener("keydown", (event) => this.step(event));
  }

  /** `cells`: one for each unit of time, in order. `total` and `about` are the summary above the chart. */
  draw(cells, unit, total, about = "") {
    Object.assign(this, { cells, unit });
    this.total.textContent = total;
    this.about.textContent = about;
    const highest = Math.max(0, ...cells.map((cell) => this.height(cell)));
    this.scale = this.max ?? ceiling(highest);
    this.top.textContent = highest > 0 || this.max ? this.format(this.scale) : "";
    if (this.bars) this.drawBars();
    else this.drawLines();
    const indexes = [0, Math.floor(cells.length / 2), cells.length - 1];
    this.ends.forEach((end, i) => (end.textContent = formatTick(cells[indexes[i]].start, unit)));
    this.point(this.at !== null && this.at < cells.length ? this.at : null);
  }

  height(cell) {
    const values = this.series.map(({ value }) => value(cell) ?? 0);
    return this.bars ? values.reduce((sum, value) => sum + value, 0) : Math.max(...values);
  }

  y(value) {
    return (HEIGHT - (HEIGHT - TOP) * Math.min(1, value / this.scale)).toFixed(1);
  }

  drawBars() {
    const width = WIDTH / this.cells.length;
    const gap = Math.min(2, Math.max(0, (width - 3) / 4)); // no gap between many columns
    const base = this.cells.map(() => 0);
    this.series.forEach(({ value }, s) => {
      const columns = this.cells.map((cell, i) => {
        const low = base[i];
        base[i] += value(cell) ?? 0;
        return base[i] > low ? `M${(i * width + gap).toFixed(1)} ${this.y(low)}V${this.y(base[i])}h${(width - 2 * gap).toFixed(1)}V${this.y(low)}Z` : "";
      });
      this.paths[s].setAttribute("d", columns.join(""));
    });
  }

  /** An unknown value is a gap; a single value between gaps is a horizontal line. */
  drawLines() {
    const width = WIDTH / this.cells.length;
    this.series.forEach(({ value }, s) => {
      const heights = this.cells.map((cell) => value(cell) ?? null);
      const steps = heights.map((height, i) => {
        if (height === null) return "";
        const continues = i > 0 && heights[i - 1] !== null;
        const isSingle = !continues && (i + 1 === heights.length || heights[i + 1] === null);
        const y = this.y(height);
        return isSingle ? `M${(i * width).toFixed(1)} ${y}h${width.toFixed(1)}` : `${continues ? "L" : "M"}${((i + 0.5) * width).toFixed(1)} ${y}`;
      });
      this.paths[s].setAttribute("d", steps.join(""));
    });
  }

  step(event) {
    const offset = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!offset || !this.cells.length) return;
    event.preventDefault();
    this.point(Math.max(0, Math.min(this.cells.length - 1, (this.at ?? this.cells.length) + offset)));
  }

  point(index) {
    this.at = index;
    const cell = index === null ? null : this.cells[index];
    this.series.forEach(({ value }, i) => (this.values[i].value.textContent = cell ? this.format(value(cell)) : ""));
    this.timeLabel.textContent = cell ? formatTick(cell.start, this.unit) : "";
    const at = cell ? ((index + 0.5) * WIDTH) / this.cells.length : 0;
    this.cursor.setAttribute("d", cell ? `M${at} 0V${HEIGHT}` : "");
    const ariaText = cell ? this.series.map(({ label, value }) => `${label} ${this.format(value(cell))}`).join(", ") : this.total.textContent;
    this.plot.setAttribute("aria-label", `${this.title}${cell ? ` at ${formatCellStart(cell.start, this.unit)}` : ""}: ${ariaText}`);
  }
}

/** Round up to 1, 2 or 5 times a power of ten. */
function ceiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value * 0.9999);
}
