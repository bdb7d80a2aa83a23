/** The management API as the pages use it. Every failure becomes an ApiError. */

import { readLines } from "../wire.js";

const TIMEOUT_MS = 20_000;
const MAX_ITEMS = 2000; // of a list that is loaded completely

export class ApiError extends Error {
  constructor(message, { status = 0, code = "", param = null } = {}) {
    super(param && !message.includes(param) ? `${param}: ${message}` : message);
    Object.assign(this, { status, code, param });
  }
}

export class Api {
  constructor(token, account) {
    Object.assign(this, { token, account });
  }

  get headers() {
    return { "cf-aig-authorization": `Bearer ${this.token}` };
  }

  get(path, query = {}, signal = null) {
    return this.send("GET", withQuery(path, query), undefined, signal);
  }

  url(path, query = {}) {
    return `admin/accounts/${encodeURIComponent(this.account)}/${withQuery(path, query)}`;
  }

  async send(method, path, body = undefined, signal = null) {
    const signals = [AbortSignal.timeout(TIMEOUT_MS), signal].filter(Boolean);
    const request = { method, headers: { ...this.headers }, cache: "no-store", signal: AbortSignal.any(signals) };
    if (body !== undefined) {
      request.body = JSON.stringify(body);
      request.headers["content-type"] = "application/json";
    }
    const reply = await fetchOk(this.url(path), request, signal);
    return reply.json();
  }

  /** Yield the values of a reply with lines of JSON, and null for an empty line. Throws an ApiError if no line comes for
      `silenceMs`. */
  async *lines(path, query, signal, silenceMs) {
    const silence = new AbortController();
    let timer = 0;
    const restartTimer = () => {
      clearTimeout(timer);
      timer = setTimeout(() => silence.abort(), silenceMs);
    };
    const request = { headers: this.headers, cache: "no-store", signal: AbortSignal.any([signal, silence.signal]) };
    try {
      restartTimer();
      const reply = await fetchOk(this.url(path, query), request, signal);
      for await (const line of readLines(reply.body)) {
        restartTimer();
        yield line ? JSON.parse(line) : null;
      }
    } catch (error) {
      if (signal.aborted || error instanceof ApiError) throw error;
      throw new ApiError("The connection to the gateway was lost.");
    } finally {
      clearTimeout(timer);
    }
  }

  /** Return all items of a paged list. */
  async all(path, signal = null) {
    const items = [];
    let after = "";
    do {
      const page = await this.get(path, { after, limit: 500 }, signal);
      items.push(...page.items);
      after = page.next;
    } while (after && items.length < MAX_ITEMS);
    return items;
  }
}

/** Return a successful reply. Throws an ApiError, or the abort error if the page aborted `signal`. */
export async function fetchOk(url, request, signal) {
  let reply;
  try {
    reply = await fetch(url, request);
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError("The gateway does not respond.");
  }
  if (reply.ok) return reply;
  const { error } = await reply.json().catch(() => ({}));
  throw new ApiError(error?.message ?? reply.statusText, { status: reply.status, code: error?.code, param: error?.param });
}

function withQuery(path, query) {
  const parameters = Object.entries(query).filter(([, value]) => value !== "" && value != null);
  return parameters.length ? `${path}?${new URLSearchParams(parameters)}` : path;
}

/** Encode one segment of a URL path. */
export const segment = (text) => encodeURIComponent(text);
