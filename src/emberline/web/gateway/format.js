/** Formats numbers and times for display. An unknown value is a dash, never a zero. */

export const NONE = "–";
const orDash = (format) => (value) => (value === null || value === undefined || Number.isNaN(value) ? NONE : format(value));
const scaled = (value) => value.toFixed(value < 10 ? 2 : value < 100 ? 1 : 0);

export const count = orDash((value) => {
  if (value < 100_000) return Math.round(value).toLocaleString("en-US");
  if (value < 1e6) return `${scaled(value / 1e3)}k`;
  return value < 1e9 ? `${scaled(value / 1e6)}M` : `${scaled(value / 1e9)}G`;
});

/** Format micro-dollars. Small amounts keep their digits, because most requests cost less than a cent. */
export const money = orDash((micros) => {
  const dollars = micros / 1e6;
  if (dollars === 0) return "$0";
  if (dollars >= 1000) return `$${count(dollars)}`;
  return dollars >= 0.1 ? `$${dollars.toFixed(2)}` : `$${dollars.toFixed(6).replace(/0+$/, "")}`;
});

/** What a request to one's own server costs: no provider bills it. */
export const LOCAL_COST = "local";
export const isLocal = (provider) => ["emberline", "ollama"].includes(provider);
export const costOf = ({ provider, micros }) => (isLocal(provider) && !micros ? LOCAL_COST : money(micros));

export const millis = orDash((ms) => {
  if (ms < 1000) return `${ms < 10 ? Number(ms.toFixed(1)) : Math.round(ms)} ms`;
  return ms < 60_000 ? `${(ms / 1e3).toFixed(ms < 10_000 ? 2 : 1)} s` : `${Math.floor(ms / 60_000)} min ${Math.round((ms % 60_000) / 1e3)} s`;
});

export const percent = orDash((share) => `${(100 * share).toFixed(share > 0 && share < 0.0995 ? 1 : 0)}%`);
export const ratio = (part, all) => (all > 0 ? part / all : null);

const DAY = 86_400_000;
const time = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
const full = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium", hour12: false });
const date = new Intl.DateTimeFormat(undefined, { dateStyle: "medium" });
const short = {
  minute: new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", hour12: false }),
  hour: new Intl.DateTimeFormat(undefined, { weekday: "short", hour: "2-digit", minute: "2-digit", hour12: false }),
  day: new Intl.DateTimeFormat(undefined, { month: "short", day: "numeric", timeZone: "UTC" }), // days are in UTC
};

export const formatRecent = orDash((ms) => (Date.now() - ms < DAY / 2 ? time.format(ms) : full.format(ms)));
/** Format the end of a window. */
export const formatEnd = orDash((ms) => (ms - Date.now() < DAY ? short.minute : date).format(ms));
export const formatDateTime = orDash((ms) => full.format(ms));
export const formatDate = orDash((ms) => date.format(ms));
/** Format the start of a chart cell. */
export const formatCellStart = (ms, unit) => (unit === "day" ? short.day : full).format(ms);
export const formatTick = (ms, unit) => short[unit].format(ms);
